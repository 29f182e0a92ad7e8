"""Casting: in which precision operators run, inside torch's own autocast.

`op_lists` names the operators, `op_table` puts a policy for each into force (csrc/torch/casting),
`autocast` opens regions and keeps casts away from optimizer steps, `functions` wraps Python
functions and `explain` shows what was cast. It imports no other package of amp_mp.
"""
