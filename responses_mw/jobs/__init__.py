"""Background responses: created here, run by any worker, followed and cancelled from any replica.

    service     what the routes use: create, follow, cancel, delete; and the tasks of this process
    follower    the readers of event logs in this process
    worker      claims jobs, renews their leases, drains
    job_runner  runs one claimed job to its end, or decides when it is retried
    event_log   writes the events of all running jobs, and ends a job in place of its worker: a lost, failed or cancelled one

The layout in Redis, and which step is atomic, is described in `state`.
"""

from .service import JobService
from .worker import Worker

__all__ = ["JobService", "Worker"]
