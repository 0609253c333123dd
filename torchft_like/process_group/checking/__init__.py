"""An opt-in check that every rank means the same collective, before any data moves.

Gloo trusts its callers. Tensors of different size end the process, where nothing can catch it; different
dtypes and reduce operations give wrong numbers in silence; a different order, or another root, is a timeout
that names no rank. With `check_collectives=True`, or `TORCHFT_CHECK_COLLECTIVES=1`, each rank tells a referee
on rank 0 what it is about to do, and does it once the referee has found that all ranks agree. Where they do
not, every rank gets one typed error with the same text, which says which rank passed what; no tensor was
touched, and the group stays usable.

torch has a check of its own (`TORCH_DISTRIBUTED_DEBUG=DETAIL`). This one exists because torch's

* makes every call block until all ranks are in it (a barrier and up to four collectives), so that programs
  which are correct with asynchronous calls deadlock under it;
* compares no root, no reduce operation and no outputs, no tensors of the coalesced collectives and of
  alltoall, none where the parts of a list are uneven, and no send or receive;
* tells each rank a different text, about itself and one other;
* cannot be aborted: it runs on a group of its own, whose waits only end with their timeout.

`core.agreement`, which is pure, says what must agree and which rank waits for which. In this folder
`messages` and `link` carry statements to the referee, `descriptions` makes statements of calls, and `backend`
puts the check in front of any backend. Which rule a collective follows is a field of its row. The user's view
is docs/checking-collectives.md.
"""
