"""The plan store: objects by content, and apart from them what the inputs led to.

```
root/objects/ab/<digest>.json    a plan, named by the digest of its content
root/actions/cd/<digest>.json    the key of a build's inputs -> the plan's digest
```

Nothing is locked. A file appears whole, by rename, and is never written again,
so a reader sees all of it or none. What is read is checked, what is damaged is
removed, and a removed object only costs a rebuild.
"""

from m2ncompile.store.local import GRACE_SECONDS, Store, default_root
from m2ncompile.store.records import (
    MAX_OBJECT_BYTES,
    ActionKey,
    Change,
    Entry,
    GcResult,
    Miss,
    VerifyResult,
)

__all__ = [
    "GRACE_SECONDS",
    "MAX_OBJECT_BYTES",
    "ActionKey",
    "Change",
    "Entry",
    "GcResult",
    "Miss",
    "Store",
    "VerifyResult",
    "default_root",
]
