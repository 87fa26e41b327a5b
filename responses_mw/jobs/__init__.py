"""Background responses. Any replica can create, follow and cancel a response, and any worker can run it."""

from .service import JobService
from .worker import Worker

__all__ = ["JobService", "Worker"]
