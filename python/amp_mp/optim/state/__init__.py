"""An optimizer's state: how masters and states are stored, saved and loaded.

`stored_formats` knows what each stored format looks like and names a state's entries,
`kept_masters` follows masters through loading, copying and sharding, `replaced` warns of parameters
that no step changes, `edit_blocks` has the blocks that edit masters, `state_dicts` loads and shows
state dicts, `check_loadable` checks them, `memory_report` counts bytes. All of it takes a `Rule`
and param_groups, no optimizer class. State is made in csrc/torch/state/live_state.cpp.
"""
