"""Callbacks of `odb-train` and its model; each works in any Trainer with an ODB strategy."""

from odb_lightning.callbacks.audit_log import AuditLog
from odb_lightning.callbacks.progress import Progress
from odb_lightning.callbacks.schedule import SampleSchedule, cosine_with_warmup
from odb_lightning.callbacks.summary import RunSummary

__all__ = ["AuditLog", "Progress", "RunSummary", "SampleSchedule", "cosine_with_warmup"]
