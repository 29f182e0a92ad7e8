"""What scripts for Apex use: amp.init with its handle, FP16_Optimizer and fp16_utils.

An FP16_Optimizer keeps its masters in `masters` around a torch optimizer, and in `fused_masters`
around one of amp_mp's.
"""
