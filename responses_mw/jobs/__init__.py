"""Background responses. Any replica can create, follow and cancel them, and any worker can run them.

    service     the operations for the routes (create, follow, cancel, delete), and the tasks of this process
    follower    the readers of event logs in this process
    worker      claims jobs, renews their leases, drains
    job_runner  runs one claimed job to its end, or decides when to retry it
    event_log   writes the events of all running jobs, and finalizes lost, failed and cancelled jobs

`state` describes the layout in Redis and the atomic steps.
"""

from .service import JobService
from .worker import Worker

__all__ = ["JobService", "Worker"]
