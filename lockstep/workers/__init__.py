"""Python processes that answer messages, and what ends a process with all its descendants.

Whatever may hang, crash or take too much memory runs in one: rewards and conversations, mathematics, chat templates,
tokenizing. Imports only the standard library, so that they start in a fraction of a second.
"""

from lockstep.workers.messages import Closed, Stream, from_json, from_plain, to_json
from lockstep.workers.worker import Worker, WorkerEnded, standard_stream, start_python

__all__ = [
    "Closed",
    "Stream",
    "Worker",
    "WorkerEnded",
    "from_json",
    "from_plain",
    "standard_stream",
    "start_python",
    "to_json",
]
