"""What `import torchft` finds in a process that was started by one in which torchft_like has its place."""

import sys

import torchft_like.as_torchft

sys.modules[__name__] = torchft_like
