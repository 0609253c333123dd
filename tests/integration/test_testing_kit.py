"""The testing kit as somebody else's test uses it, with a script of his own (docs/testing.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchft_like.testing.cluster import Cluster
from torchft_like.testing.faults import Fault
from torchft_like.testing.journal import Journal, JournalReader
from torchft_like.testing.ranks import RankError, running

pytestmark = pytest.mark.integration

SCRIPT = """
import sys, time, torch
from torchft_like import Manager, Optimizer, ProcessGroupGloo
from torchft_like.digest import state_digest
from torchft_like.testing.journal import Journal, Witness

name = sys.argv[1]
torch.manual_seed(ord(name))
net = torch.nn.Linear(4, 2)
manager = Manager(
    pg=ProcessGroupGloo(60), load_state_dict=net.load_state_dict, state_dict=net.state_dict,
    min_replica_size=1, replica_id=name,
)
witness = Witness(manager, Journal.of_this_process(), "ab".index(name))
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
optimizer = Optimizer(manager, sgd)
while True:
    optimizer.zero_grad()
    net(torch.ones(3, 4)).sum().backward()
    for parameter in net.parameters():
        manager.allreduce(parameter.grad).wait()
    witness.attend(manager.current_step())
    optimizer.step()
    if witness.has_committed:
        witness.testify(WHAT_IT_SAYS)
    time.sleep(0.03)
"""


def write(folder: Path, digest: str) -> str:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("WHAT_IT_SAYS", digest))
    return str(script)


def test_a_script_goes_on_without_a_replica_which_comes_back(tmp_path: Path) -> None:
    script = write(tmp_path, "state_digest(net.state_dict())")
    with Cluster(tmp_path) as cluster:
        a, b = (cluster.launch(name, [script, name]) for name in "ab")
        cluster.wait_for_quorum_of(a, b)
        a.kill()
        cluster.wait_for_quorum_of(b)
        again = cluster.launch("a", [script, "a"])
        cluster.wait_for_quorum_of(b, again)
        assert again.events("heal")


def test_replicas_that_differ_after_a_step_fail_the_test(tmp_path: Path) -> None:
    script = write(tmp_path, "name")
    with (
        pytest.raises(AssertionError, match=r"agreement: a.* has digest a, but b.* has b"),
        Cluster(tmp_path) as cluster,
    ):
        cluster.wait_for_quorum_of(*(cluster.launch(name, [script, name]) for name in "ab"))


def fail(_: object) -> None:
    raise ValueError("there is none")


def test_what_goes_wrong_in_a_rank_is_told() -> None:
    with running(1) as (failing,):
        with pytest.raises(RankError, match="ValueError: there is none"):
            failing.ask(fail)
        failing.kill()
        with pytest.raises(RankError, match="ended with -9"):
            failing.answer()
    with running(1, limit_s=0.1) as (silent,):
        silent.stop()
        with pytest.raises(RankError, match=r"no answer within 0\.1 s"):
            silent.ask(fail)


def test_a_wait_that_fails_shows_the_logs_and_ends_the_lighthouse(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with pytest.raises(AssertionError, match=r"(?s)not within.*: never.*lighthouse listening on"), cluster:
        cluster.wait_until(lambda: False, "never", limit_s=0.1)
    assert cluster.lighthouse.is_gone


def test_a_process_that_ends_without_a_reason_fails_the_test(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.lighthouse.kill()
        cluster.lighthouse.may_end = False
        with pytest.raises(AssertionError, match=r"lighthouse.*ended with -9"):
            cluster.check()
        cluster.lighthouse.may_end = True


def test_a_reader_leaves_a_line_that_is_still_being_written_for_later(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path)
    assert reader.records() == []
    Journal(str(path)).write("commit", step=1)
    whole = path.read_text()
    path.write_text(whole + whole[:10])
    assert [record["step"] for record in reader.records("commit")] == [1]
    path.write_text(whole * 2)
    assert [record["step"] for record in reader.records("commit")] == [1, 1]
    assert reader.records("fault") == []


def test_a_triggered_fault_strikes_one_process_only(tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    fault = Fault.parse(f"kill@heal@{trigger}")
    assert (fault.act, fault.place) == ("kill", "heal")
    assert not fault.is_triggered()
    trigger.touch()
    assert [fault.is_triggered(), fault.is_triggered()] == [True, False]


@pytest.mark.parametrize("text", ["kill", "kill@somewhere", "sleep@heal", "kill@heal@"])
def test_a_fault_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not act@place"):
        Fault.parse(text)
