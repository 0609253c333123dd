"""How the parts of a gang come about: the members of each meet in a store that their first one serves.

All members of the whole take part, and say two things to each other over the group that they have: how
they are told to split up, and, the first of each part, where its members meet. So different arguments
are an error on every member; no store of the whole has to be alive, and no names in it can clash, as
every meeting has a store of its own.

INVARIANT: a store is served until every member of its part has met the others, and no longer. That they
have is known from a barrier of the new group, and a member that dies meanwhile breaks the barrier.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lighthouse.address import Address, own_host
from torchft_like.devices import beside_captures
from torchft_like.errors import BindError, GangError
from torchft_like.gang.likeness import job_ranks, make_like, store_of, timeout_of
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.served_store import serve_store

RECORD_BYTES = 512
_DIGEST_BYTES = 16
_TEXT_BYTES_MAX = RECORD_BYTES - _DIGEST_BYTES

Exchange = Callable[[bytes], list[bytes]]


class Part(NamedTuple):
    """A configured group of some members of `whole`, and the configuration of that with which it ends.

    A member that has died is noticed by those who talk to it. Those who do not, in a part of which it was no
    member, would wait for partners that have long gone on to meet anew. So the end of the whole's
    configuration is the end of all its parts, and of their parts.
    """

    group: ProcessGroup
    whole: dist.ProcessGroup
    ending: Configuration

    @property
    def is_latest(self) -> bool:
        """Whether the whole has not been configured anew since, aborted or not."""
        return not isinstance(self.whole, ProcessGroup) or self.whole.configuration is self.ending


class Meeting:
    """One splitting up of `whole`.

    Args:
        whole: the group of all members.
        device: of the members' tensors.
        partition: ranks in `whole`; the caller may be in one of them.
    """

    def __init__(
        self, whole: dist.ProcessGroup, device: torch.device, partition: Sequence[tuple[int, ...]]
    ) -> None:
        self._whole = whole
        self._device = device
        self._partition = partition
        self._rank = whole.rank()
        # Before anything is said: what ends from now on ends the part, too. A group of torch's never does.
        self._ending = whole.configuration if isinstance(whole, ProcessGroup) else Configuration()

    def hold(self, exchange: Exchange) -> Part | None:
        """Meet; None where the caller is in no part.

        Args:
            exchange: gives what all members of the whole pass to it, in the order of their ranks.

        Raises:
            ValueError: the members were told different partitions; the same on all of them.
            GangError, ProcessGroupError: the caller's part could not meet.
        """
        own = next((ranks for ranks in self._partition if self._rank in ranks), ())
        store, text = self._serve() if len(own) > 1 and own[0] == self._rank else (None, "")
        with ExitStack() as until_met:
            until_met.callback(_let_go, store)
            del store  # whoever keeps an error keeps this frame: let that not keep the server
            records = exchange(_record(self._partition, text))
            check_records(records)
            if not own:
                return None
            group = make_like(self._whole, self._device)
            try:
                self._configure(group, own, _text(records[own[0]]))
            except BaseException:
                group.abort("its members could not meet")  # not shutdown, which waits for what goes on in it
                raise
            return Part(group, self._whole, self._ending)

    def _serve(self) -> tuple[TCPStore | None, str]:
        try:
            store, address = serve_store(own_host(store_of(self._whole)), self._timeout)
        except (BindError, RuntimeError) as error:
            return None, f"!{error}"
        return store, str(address)

    def _configure(self, group: ProcessGroup, own: tuple[int, ...], text: str) -> None:
        if text.startswith("!"):
            raise GangError(f"rank {own[0]} could not serve a store for the ranks {list(own)}: {text[1:]}")
        ranks = job_ranks(self._whole)
        place = own.index(self._rank)
        address = text or str(Address("127.0.0.1", 1))  # a group of one asks no store
        global_ranks = [ranks[rank] for rank in own]
        with beside_captures(self._device):
            group.configure(
                f"{address}/gang", place, len(own), global_ranks=global_ranks, ends_with=self._ending
            )
            group.barrier().wait()
        self._ending.check()

    @property
    def _timeout(self) -> timedelta:
        return timeout_of(self._whole, self._device)


def check_records(records: Sequence[bytes]) -> None:
    """Whether all members were told the same partition.

    Raises:
        ValueError: they were not.
    """
    digests = [record[:_DIGEST_BYTES] for record in records]
    if len(set(digests)) > 1:
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise ValueError(f"the members were given different ranks for the new gangs: {others} other than 0")


def _record(partition: Sequence[tuple[int, ...]], text: str) -> bytes:
    digest = hashlib.blake2b(json.dumps(partition).encode(), digest_size=_DIGEST_BYTES).digest()
    return digest + text.encode()[:_TEXT_BYTES_MAX].ljust(_TEXT_BYTES_MAX, b"\0")


def _text(record: bytes) -> str:
    return record[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")


def _let_go(store: object) -> None:
    """The server ends with the last reference to it, which this call's argument is."""
