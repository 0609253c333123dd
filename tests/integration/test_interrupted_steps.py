"""Steps that an error or Ctrl-C ends between two lines of the Manager keep the next one from nothing."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.managers import lighthouse_here, manager_alone
from torchft_like import ConfigError, LighthouseServer, ManagedProcessGroup, Manager
from torchft_like.checkpointing import HTTPTransport
from torchft_like.errors import StepLostError

pytestmark = pytest.mark.integration

LIMIT_S = 60.0


def alone(lighthouse: LighthouseServer, **settings: Any) -> Manager:
    return manager_alone("a", lighthouse.address(), nn.Linear(1, 1), **settings)


@pytest.mark.progress
@pytest.mark.parametrize("error", [RuntimeError("the transport is ill"), KeyboardInterrupt()])
def test_a_step_that_could_not_ask_for_its_quorum_keeps_no_other_waiting(error: BaseException) -> None:
    class Ill(HTTPTransport[Any]):
        error: BaseException | None = None

        def metadata(self) -> str:
            failure, self.error = self.error, None
            if failure is not None:
                raise failure
            return super().metadata()

    transport = Ill(LIMIT_S)
    with (
        lighthouse_here(min_replicas=1) as lighthouse,
        alone(lighthouse, checkpoint_transport=transport, quorum_timeout=LIMIT_S / 2) as manager,
    ):
        transport.error = error
        with pytest.raises(type(error)):
            manager.start_quorum()
        with pytest.raises((RuntimeError, StepLostError)):
            manager.should_commit()
        manager.start_quorum()
        assert manager.should_commit()


@pytest.mark.progress
def test_a_transport_that_fails_as_a_quorum_comes_ends_the_wait_for_it() -> None:
    class Ill(HTTPTransport[Any]):
        is_ill = False

        def use_key(self, key: str) -> None:
            if self.is_ill:
                raise RuntimeError("the transport is ill")
            super().use_key(key)

    transport = Ill(LIMIT_S)
    with (
        lighthouse_here(min_replicas=1) as lighthouse,
        alone(lighthouse, checkpoint_transport=transport) as manager,
    ):
        transport.is_ill = True
        manager.start_quorum()
        with pytest.raises(RuntimeError, match="the transport is ill"):
            manager.should_commit()
        transport.is_ill = False
        manager.start_quorum()
        assert manager.should_commit()


def test_what_is_no_error_spoils_no_step_and_is_refused() -> None:
    with lighthouse_here(min_replicas=1) as lighthouse, alone(lighthouse) as manager:
        manager.start_quorum()
        for tell in (manager.report_error, manager.interrupt):
            with pytest.raises(ConfigError, match="takes the error that has spoilt the step, not None"):
                tell(None)  # type: ignore[arg-type]
        assert manager.should_commit()
    with pytest.raises(ConfigError, match="takes the Manager of this rank, not None"):
        ManagedProcessGroup(None)  # type: ignore[arg-type]
