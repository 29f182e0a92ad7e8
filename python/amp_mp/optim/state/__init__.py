"""An optimizer's state: how masters and states are stored, saved and loaded.

`formats` knows what each stored format looks like, `schema` names a state's entries,
`masters` gives low-precision parameters their float32 values back, `saving` writes state dicts,
`check_loadable` and `loading` read them, `memory_report` counts bytes. All of it takes a `Rule` and
param_groups, no optimizer class. State is made in csrc/torch/state/live_state.cpp.
"""
