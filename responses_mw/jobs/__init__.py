"""Background responses, and the ingestion of files. Any replica can create jobs, and any worker can run them."""

from .ingestion import IngestionWorker
from .queue_worker import AnyWorker
from .service import JobService
from .worker import Worker

__all__ = ["AnyWorker", "IngestionWorker", "JobService", "Worker"]
