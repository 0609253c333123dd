"""The probes, in the order of what their answers are worth.

A probe is a process with a limit of its own: tests of tests/gpu, or a module of this folder. Each has a form
that needs no GPU, over Gloo where there is one, so that its code has run before it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = {
    "C1": "Can it work?",
    "C2": "What becomes of faults, with real kernels?",
    "C3": "What does it cost?",
}
_PYTEST = (
    "pytest",
    "-o",
    "addopts=-ra",
    "-W",
    "ignore::pytest.PytestConfigWarning",
    "-W",
    "ignore::pytest.PytestUnknownMarkWarning",
    "-p",
    "no:cacheprovider",
    "-q",
)


@dataclass(frozen=True)
class Probe:
    """One question.

    Attributes:
        name: unique, and what results are kept under.
        limit_s: when its process is killed with all that it has started.
        on_gpu, without: what follows `python -m`, with a GPU and in a dry run.
    """

    name: str
    stage: str
    question: str
    limit_s: float
    on_gpu: tuple[str, ...]
    without: tuple[str, ...]

    @property
    def is_of_tests(self) -> bool:
        return self.on_gpu[0] == "pytest"


def part_of_name(expression: str) -> str:
    """Return the words in names of tests that pytest chooses by one of the expressions below."""
    return expression.removeprefix("not ").split(")")[0].removeprefix("(")


def _tests(name: str, stage: str, question: str, limit_s: float, *selection: str) -> Probe:
    """Tests that have a form over Gloo."""
    return Probe(
        name,
        stage,
        question,
        limit_s,
        (*_PYTEST, "-m", "gpu", *selection),
        (*_PYTEST, "-m", "not gpu", *selection),
    )


def _both(name: str, stage: str, question: str, limit_s: float, file: str, test: str) -> list[Probe]:
    """The same tests over NCCL and over Baby NCCL."""
    path = f"tests/gpu/{file}"
    return [
        _tests(f"{name}, NCCL", stage, question, limit_s, path, "-k", f"({test}) and not baby"),
        _tests(f"{name}, Baby NCCL", stage, question, limit_s, path, "-k", f"({test}) and baby"),
    ]


def _device_only(name: str, question: str, limit_s: float, files: str, stand_in: str, *more: str) -> Probe:
    """Tests of what only CUDA has. A dry run takes the unit tests with CUDA replaced."""
    own = tuple(f"tests/gpu/{file}" for file in files.split())
    others = tuple(f"tests/unit/{file}" for file in stand_in.split())
    return Probe(name, "C1", question, limit_s, (*_PYTEST, "-m", "gpu", *own, *more), (*_PYTEST, *others))


def _costs(name: str, question: str, limit_s: float, module: str, *options: str) -> Probe:
    command = (f"tools.gpu.{module}", *options)
    return Probe(name, "C3", question, limit_s, command, (*command, "--dry-run"))


def _can_it_work() -> list[Probe]:
    ranks = "test_ranks.py"
    killed = "trainers_stream_goes_on"
    return [
        *_both(
            "sums",
            "C1",
            "2 and 4 ranks on one GPU: every collective is right",
            160,
            ranks,
            "every_collective",
        ),
        _device_only(
            "a killed child's event",
            "A stream waits for an event of a process that is killed: does it go on? The gate for Baby NCCL",
            80,
            "test_cuda_ipc.py",
            "process_group/baby/test_cuda_sharing.py",
            "-k",
            killed,
        ),
        _device_only(
            "memory and events between processes",
            "A subprocess works on the trainer's memory in the order of its streams; killed, it loses none",
            110,
            "test_cuda_ipc.py",
            "process_group/baby/test_cuda_sharing.py",
            "-k",
            f"not {killed}",
        ),
        *_both("init and abort", "C1", "20 groups are made and aborted", 110, ranks, "twenty_groups"),
        *_both(
            "captures", "C1", "CUDA graphs are captured beside collectives", 110, ranks, "graphs_are_captured"
        ),
        _tests(
            "fork server",
            "C1",
            "The fork server of Baby groups does not open the GPU",
            110,
            f"tests/gpu/{ranks}",
            "-k",
            "server_that_forks",
        ),
        _device_only(
            "one rank of NCCL",
            "Streams, limits, aborts and memory of a group of one",
            220,
            "test_nccl.py",
            "process_group/test_nccl.py process_group/test_device_watch.py",
        ),
        _device_only(
            "one rank of Baby NCCL",
            "The same, with NCCL in a subprocess",
            220,
            "test_baby_nccl.py",
            "process_group/baby/test_cuda_sharing.py",
        ),
        _device_only(
            "the rest of tests/gpu",
            "Manager, fingerprints, gangs, coordinators, and whatever else has tests there",
            220,
            "",
            "process_group/test_wrappers.py",
            "tests/gpu",
            *(
                f"--ignore=tests/gpu/test_{done}.py"
                for done in ("ranks", "training", "checkpoints", "cuda_ipc", "nccl", "baby_nccl")
            ),
        ),
    ]


def _states() -> list[Probe]:
    question = "A state to and from the host, and from process to process without it, beside captures"
    stand_ins = "checkpointing/test_host_memory.py process_group/test_device_block.py"
    return [_device_only("checkpoints", question, 220, "test_checkpoints.py", stand_ins)]


def _faults() -> list[Probe]:
    ranks, training = "test_ranks.py", "test_training.py"
    return [
        *_both(
            "killed and stopped",
            "C2",
            "Ranks are killed and stopped in an all-reduce",
            220,
            ranks,
            "survivors_end",
        ),
        *_both(
            "aborts", "C2", "An abort ends a wait, a synchronize and a connect", 160, ranks, "an_abort_ends"
        ),
        *_both(
            "kill and heal",
            "C2",
            "3 Managers, one killed and healed twice, equal bits",
            260,
            training,
            "lose_one",
        ),
        *_both(
            "membership", "C2", "2, 1, 3, 2 ranks, 30 times; nothing leaks", 120, ranks, "membership_changes"
        ),
        *_both(
            "two groups",
            "C2",
            "The abort of one group leaves the other alone",
            110,
            ranks,
            "another_of_the_same",
        ),
        *_both("a flipped bit", "C2", "It is found and healed", 120, training, "flipped_bit"),
        _tests(
            "HSDP 2x2",
            "C2",
            "A sharded group dies and heals",
            120,
            f"tests/gpu/{training}",
            "-k",
            "sharded_group",
        ),
        *_both("gang and coordinator", "C2", "3 ranks talk over both", 110, ranks, "a_gang_and"),
    ]


def _prices() -> list[Probe]:
    return [
        _costs(
            "step, DDP",
            "Manager + DDP over plain DDP, GPT of 350 M parameters in bf16",
            120,
            "steps",
            "--ddp",
        ),
        _costs("operations", "Time and CPU of an all-reduce; 1,000 of them in flight", 100, "operations"),
        _costs(
            "aborts and configures", "Of 2 ranks, from the abort to the end of a blocked sum", 90, "aborts"
        ),
        _costs(
            "heals",
            "State from GPU to GPU on one node, over HTTP and a block",
            120,
            "heals",
        ),
        _costs("step, FSDP2", "Manager + FSDP2 over plain FSDP2, the same model", 120, "steps", "--fsdp2"),
        _costs("fingerprint", "Bytes of a state on the device that are read in a second", 60, "fingerprints"),
        _costs(
            "quantize",
            "Bytes that triton's kernels move in a second, beside torch's; an all-reduce in fp8",
            100,
            "quantized",
        ),
        _costs("memory", "What a Baby group's processes take of the device and of the host", 60, "memory"),
    ]


PROBES = (*_can_it_work(), *_states(), *_faults(), *_prices())
