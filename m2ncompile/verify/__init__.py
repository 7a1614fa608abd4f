"""Running a plan on real data at reduced dims, against the model's own loaders."""

from m2ncompile.verify.check import Verification, verify
from m2ncompile.verify.workers import Execution, execute

__all__ = ["Execution", "Verification", "execute", "verify"]
