"""An opt-in check that every rank means the same collective, before any data moves.

Gloo trusts its callers. Tensors of different size end the process, where nothing can catch it; different
dtypes and reduce operations give wrong numbers without a word; a different order, or another root, is a
timeout that names nobody. With `check_collectives=True`, or `TORCHFT_CHECK_COLLECTIVES=1`, each rank tells
a referee on rank 0 what it is about to do, and does it once the referee has found that all ranks agree.
Where they do not, every rank gets one typed error with the same text, which says who passed what; no
tensor was touched, and the group stays usable.

torch has a check of its own (`TORCH_DISTRIBUTED_DEBUG=DETAIL`). Ours exists because that one

* makes every call block until all ranks are in it (a barrier and up to four collectives), so that programs
  which are correct with asynchronous calls deadlock under it;
* compares no root, no reduce operation and no outputs, no tensors of the coalesced collectives and of
  alltoall, none where the parts of a list are uneven, and no send or receive;
* tells each rank another story, about itself and one other;
* knows no abort: it runs on a group of its own, whose waits only end with their timeout.

`torchft_like.agreement` says what must agree and who waits for whom, and is pure. Here `messages` and `link`
are how the ranks reach the referee, `descriptions` makes statements of calls, and `backend` puts the check
in front of any backend. Which rule a collective follows is a field of its row. The user's view is
docs/checking-collectives.md.
"""
