"""Background responses: created here, run by any worker, followed and cancelled from any replica.

    crew        what runs of all this in one process
    background  what the routes ask for: create, follow, cancel, settle
    follower    the readers of event logs in this process
    worker      claims jobs, keeps their leases, drains
    run         one job, from its taking to its end
    flusher     writes the events of all running jobs
    ending      the end of a job that its worker did not write: lost, or cancelled

What lies in Redis, and which step is atomic, is in ``state``.
"""

from .background import Background
from .follower import Followers
from .service import JobService
from .worker import Worker

__all__ = ["Background", "Followers", "JobService", "Worker"]
