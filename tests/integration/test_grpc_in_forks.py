"""Processes that a trainer forks speak gRPC of their own: that of the script, that of grpc.aio, and ours."""

from __future__ import annotations

import sys

import pytest

from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

COMMON = """
import asyncio, os, sys, threading
from concurrent import futures
from datetime import timedelta
import grpc, grpc.aio
from grpc.aio import EOF, UsageError
from torchft_like.coordination import LighthouseClient, LighthouseServer
from lighthouse.errors import ForkError

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        if details.method == "/echo/stream":
            return grpc.unary_stream_rpc_method_handler(lambda request, _: iter([request, request]))
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)

def serve():
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"

def ask(target):
    with grpc.insecure_channel(target) as channel:
        return channel.unary_unary("/echo/one")(b"word", timeout=60)

async def ask_aio(target):
    async with grpc.aio.insecure_channel(target) as channel:
        words = [await channel.unary_unary("/echo/one")(b"word", timeout=60)]
        call = channel.unary_stream("/echo/stream")(b"word", timeout=60)
        while (word := await call.read()) is not EOF:
            words.append(word)
        return words

async def misused():
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.stream_stream("/echo/one")(iter([b"word"]))
        await call.write(b"more")  # it has an iterator already

def in_a_fork(work):
    forked = os.fork()
    if forked == 0:
        work()
        sys.exit(0)  # with Python's cleanup
    assert os.waitpid(forked, 0)[1] == 0

lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
client = LighthouseClient(lighthouse.address(), timedelta(seconds=60))
over = threading.Event()

def speak():
    while not over.wait(0.002):  # to be somewhere in gRPC at a fork, and leave the forks the processor
        client.heartbeat("a")

threads = [threading.Thread(target=speak) for _ in range(2)]
for thread in threads:
    thread.start()
server, target = serve()
"""

OWN = (
    COMMON
    + """
def speaks(generations):
    assert ask(target) == b"word"
    assert asyncio.run(ask_aio(target)) == [b"word"] * 3
    own, address = serve()
    assert ask(address) == b"word"
    own.stop(None).wait()
    LighthouseClient(lighthouse.address(), timedelta(seconds=60)).heartbeat("b")
    inner = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    LighthouseClient(inner.address(), timedelta(seconds=60)).heartbeat("c")
    try:
        grpc.insecure_channel(address).unary_unary("/echo/one")(b"word", timeout=60)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    try:
        asyncio.run(misused())
    except UsageError:
        print("misuse is caught", flush=True)
    print("generation", generations, "speaks", flush=True)
    if generations > 1:
        in_a_fork(lambda: speaks(generations - 1))
    inner.shutdown()

try:
    in_a_fork(lambda: speaks(2))  # each loads the library anew, which takes seconds
    assert ask(target) == b"word"
    client.heartbeat("a")
    print("the parent speaks", flush=True)
finally:
    over.set()
"""
)

PARENTS = (
    COMMON
    + """
import gc

channel = grpc.insecure_channel(target)
call = channel.unary_unary("/echo/one")
call(b"word", timeout=60)
stream = channel.unary_stream("/echo/stream")
loop = asyncio.new_event_loop()

async def made():
    return grpc.aio.insecure_channel(target)

aio = loop.run_until_complete(made())
secret = grpc.ssl_channel_credentials()

async def ask_inherited():
    await aio.unary_unary("/echo/one")(b"word", timeout=60)

def refused(action):
    try:
        action()
    except ForkError as error:
        return "in the process that uses it" in str(error)
    return False

def is_refused():
    actions = [
        lambda: call(b"word", timeout=60),
        lambda: next(stream(b"word", timeout=60)),
        lambda: channel.unary_unary("/echo/one"),
        lambda: channel.subscribe(print),
        lambda: asyncio.run(ask_inherited()),
        lambda: client.heartbeat("a"),
        lambda: lighthouse.shutdown(),
    ]
    print("refused:", [refused(action) for action in actions], flush=True)
    grpc.secure_channel(target, secret).unary_unary("/echo/one")

def is_silent():
    global channel, call, stream, aio, secret, server, client
    channel = call = stream = aio = secret = server = client = None
    gc.collect()
    print("libraries:", open("/proc/self/maps").read().count("memfd:cygrpc"), flush=True)

try:
    in_a_fork(is_silent)
    in_a_fork(is_refused)
finally:
    over.set()
"""
)


def test_a_fork_and_its_forks_speak_grpc_of_their_own(processes: Processes) -> None:
    parent = processes.start(sys.executable, "-c", OWN)
    parent.wait_for_output("the parent speaks")
    assert parent.wait() == 0
    assert parent.output.count("generation 2 speaks") == parent.output.count("generation 1 speaks") == 1
    assert parent.output.count("misuse is caught") == 2


def test_what_the_parent_made_is_refused_in_a_fork_which_loads_no_grpc(processes: Processes) -> None:
    parent = processes.start(sys.executable, "-c", PARENTS)
    parent.wait_for_output("libraries: 0")
    parent.wait_for_output(r"refused: \[" + ", ".join(["True"] * 7) + r"\]")
    assert parent.wait() == 0
    assert "Exception ignored" not in parent.output


# A server that has been called, so that its threads are in gRPC.
SERVE = """
def serve():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary("/nobody/serves", None, None)(b"", timeout=60)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    return server
"""

UNUSED = f"""
import os, sys
from concurrent import futures
import torchft_like, lighthouse.net
import grpc
{SERVE}
def speak_in_a_fork():
    if (forked := os.fork()) == 0:
        server = serve()
        print("a copy of its own:", "memfd:cygrpc" in open("/proc/self/maps").read(), flush=True)
        server.stop(None).wait()
        sys.exit(0)
    assert os.waitpid(forked, 0)[1] == 0

speak_in_a_fork()
server = serve()
speak_in_a_fork()
server.stop(None).wait()
"""


def test_a_fork_of_a_process_without_other_threads_uses_the_library_that_is_there(
    processes: Processes,
) -> None:
    parent = processes.start(sys.executable, "-c", UNUSED)
    assert parent.wait() == 0, parent.output
    assert parent.output == "a copy of its own: False\na copy of its own: True\n"


IMPORTED_FIRST = f"""
import os, sys
for name in "GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY":
    os.environ.pop(name, None)
import grpc
from concurrent import futures
if sys.argv[1] == "used":
    server = grpc.server(futures.ThreadPoolExecutor(1))
import torchft_like
{SERVE}
server = serve()
for _ in range(10):
    if (forked := os.fork()) == 0:
        os._exit(0)
    os.waitpid(forked, 0)
server.stop(None).wait()
print("over", flush=True)
"""


@pytest.mark.parametrize("when", ["imported", "used"])
def test_handlers_of_forks_are_off_or_it_is_said(processes: Processes, when: str) -> None:
    parent = processes.start(sys.executable, "-c", IMPORTED_FIRST, when)
    parent.wait_for_output("over")
    assert parent.wait() == 0
    is_told = "gRPC was in use before torchft_like was imported" in parent.output
    has_handlers = "skipping fork() handlers" in parent.output
    assert is_told == has_handlers == (when == "used")


def test_whoever_wants_grpcs_handlers_is_told_what_they_do(processes: Processes) -> None:
    program = "import torchft_like, lighthouse.net; print('over')"
    parent = processes.start(sys.executable, "-c", program, env={"GRPC_ENABLE_FORK_SUPPORT": "1"})
    assert parent.wait() == 0
    assert parent.output.count("GRPC_ENABLE_FORK_SUPPORT=1: gRPC's handlers of a fork crash") == 1
