"""For training tools of others: docs/trainers.md and docs/watching.md.

`trainer` is for the Trainer of transformers. It needs nothing that amp_mp itself does not.
"""

from amp_mp.integrations import trainer

__all__ = ["trainer"]
