"""A training function that is run again in the same process after an error, and the health checks in between.

It must not know what the function trains.
"""

from torchft_like.core.restarts import Restart as Restart
from torchft_like.in_process.function import restartable as restartable
