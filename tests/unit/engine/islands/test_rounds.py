"""Islands and their server: rounds against their definition, faults, strangers."""

import logging
import math
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par.engine.data.islands.coding import encode
from lightning_par.engine.data.islands.options import Outer
from lightning_par.errors import IslandError, NonFiniteError
from tests.support.exhaustive import some
from tests.support.islands import Island, serving, SHAPES, together

FAST = {"timeout": 60.0}


def start(seed: int = 3, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()
    }


def of_last(island: Island) -> tuple[list[int], list[int]]:
    """Who contributed to the last update of an island, and who was late."""
    last = island.ranks[0].exchanges[-1]
    return last.islands, last.late


def gradient(island: int, step: int, name: str) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * island + 10 * step + sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=draw, dtype=torch.float64) * 0.1


def train(islands: list[Island], steps: range, samples: Mapping[int, int] | None = None) -> None:
    """Train islands in lock step, each in a thread of its own."""

    def run(island: Island) -> None:
        for step in steps:
            count = (samples or {}).get(island.number, 1)
            island.step(lambda name, s=step: gradient(island.number, s, name), count)

    together(*(lambda i=i: run(i) for i in islands))


def lock_step(**options: Any) -> Outer:
    return Outer(**{"min_islands": 2, "grace": math.inf, **FAST, **options})


def test_one_step_of_rate_one_equals_synchronous_sgd() -> None:
    outer = lock_step(every=1, optimizer="sgd", lr=1.0, quantize="none")
    wanted = start()
    with serving() as server:
        islands = [Island(server.port, i, outer, start(seed=i)) for i in range(2)]
        for island in islands:  # the first one gives the weights
            island.join()
        wanted = start(seed=0)
        train(islands, range(4), {0: 3, 1: 1})
        for step in range(4):
            for name in SHAPES:
                wanted[name] -= 0.75 * gradient(0, step, name) + 0.25 * gradient(1, step, name)
        for island in islands:
            torch.testing.assert_close(island.weights(), wanted, rtol=0, atol=1e-12)
            island.close()


def reference(outer: Outer, steps: int, fragments: list[list[str]]) -> dict[str, Tensor]:
    """DiLoCo of two islands in one process, tensor by tensor; float64."""
    exact, shown = start(), start()
    own = [start(), start()]
    base = start()
    owed = [{n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()} for _ in range(2)]
    momentum = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    for step in range(steps):
        for i in range(2):
            for name in SHAPES:
                own[i][name] -= gradient(i, step, name)
        for number, names in enumerate(fragments):
            if (step + 1) % outer.every != (number + 1) * outer.every // len(
                fragments
            ) % outer.every:
                continue
            for name in names:
                mean = torch.zeros(SHAPES[name], dtype=torch.float64)
                for i in range(2):
                    moved = base[name] - own[i][name] + owed[i][name]
                    arrives = encode(moved, outer.quantize).values(torch.float64)
                    owed[i][name] = moved - arrives
                    mean += arrives / 2
                momentum[name] = outer.momentum * momentum[name] + mean
                exact[name] -= outer.lr * (mean + outer.momentum * momentum[name])
                update = encode(exact[name] - shown[name], outer.quantize)
                shown[name] += update.values(torch.float64)
                base[name] = shown[name].clone()
                for i in range(2):
                    own[i][name] = base[name].clone()
    return own[0]


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_streamed_rounds_equal_their_definition(kind: str) -> None:
    outer = lock_step(every=4, fragments=2, quantize=kind)
    with serving() as server:
        islands = [Island(server.port, i, outer, start()) for i in range(2)]
        for island in islands:
            island.join()
        held = server.meeting.weights
        assert held is not None
        fragments = [fragment.names for fragment in held.fragments]
        train(islands, range(12))
        own = reference(outer, 12, fragments)
        # After step 12 both fragments have just been exchanged, or half a round ago.
        for island in islands:
            for name in fragments[1]:
                torch.testing.assert_close(island.weights()[name], own[name], rtol=0, atol=1e-10)
            island.close()
        assert [fragment.version for fragment in held.fragments] == [3, 3]


@pytest.mark.parametrize("kind", some(["none", "bf16", "int8", "int4"], large=["bf16", "int4"]))
def test_islands_of_other_meshes_hold_the_same_bits(kind: str) -> None:
    outer = lock_step(every=2, quantize=kind, min_islands=3)
    first = start(dtype=torch.float32)
    with serving() as server:
        meshes = ["columns", "stages", "one"]
        islands = [Island(server.port, i, outer, first, m) for i, m in enumerate(meshes)]
        for island in islands:
            island.join()
        train(islands, range(6))
        held = [island.weights() for island in islands]
        shared = server.meeting.weights
        assert shared is not None
        for found in held:
            for name in SHAPES:
                assert torch.equal(found[name], shared.shown[name])
                assert not torch.equal(found[name], first[name])
        for island in islands:
            island.close()


def test_what_is_learned_while_a_fragment_is_on_its_way_is_kept() -> None:
    outer = lock_step(every=4, overlap=2, optimizer="average", quantize="none", min_islands=1)
    with serving() as server:
        island = Island(server.port, 0, outer, start())
        island.join()
        for step in range(6):
            island.step(lambda name, s=step: gradient(0, s, name))
        wanted = start()
        for step in range(6):
            for name in SHAPES:
                wanted[name] -= gradient(0, step, name)
        torch.testing.assert_close(island.weights(), wanted, rtol=0, atol=1e-12)
        shared = island.ranks[0].shared()
        assert all(not torch.equal(value, wanted[box.name]) for box, value in shared.items())
        island.ranks[0].finish(samples=1)  # the steps since the last exchange count, too
        shared = island.ranks[0].shared()
        assert all(torch.equal(island.parts[0][box], value) for box, value in shared.items())
        torch.testing.assert_close(island.weights(), wanted, rtol=0, atol=1e-12)
        assert island.ranks[0].rounds == 2
        island.ranks[0].finish(samples=0)
        assert island.ranks[0].rounds == 2  # nothing was learned since
        island.close()


def test_nobody_waits_for_others_without_grace() -> None:
    """The parameter server: each movement is merged when it comes, also one that began earlier."""
    outer = Outer(every=1, optimizer="sgd", lr=0.5, quantize="none", grace=0, **FAST)
    with serving() as server:
        islands = [Island(server.port, i, outer, start()) for i in range(2)]
        for island in islands:
            island.join()
        wanted = start()
        for number, step in [(0, 0), (0, 1), (1, 0), (0, 2)]:
            islands[number].step(lambda name, i=number, s=step: gradient(i, s, name))
            for name in SHAPES:
                wanted[name] -= 0.5 * gradient(number, step, name)
            torch.testing.assert_close(islands[number].weights(), wanted, rtol=0, atol=1e-12)
        for island in islands:
            island.close()


def test_late_island_is_not_waited_for_twice_and_its_movement_counts() -> None:
    outer = Outer(every=1, optimizer="average", quantize="int8", grace=2.0, **FAST)
    with serving() as server:
        islands = [Island(server.port, i, outer, start()) for i in range(2)]
        for island in islands:
            island.join()
        quick, late = islands
        quick.step(lambda name: gradient(0, 0, name))
        assert (quick.ranks[0].exchanges[-1].islands, quick.ranks[0].exchanges[-1].late) == (
            [0],
            [1],
        )
        quick.step(lambda name: gradient(0, 1, name))
        assert (quick.ranks[0].exchanges[-1].islands, quick.ranks[0].exchanges[-1].late) == (
            [0],
            [],
        )

        def follow() -> None:
            while server.meeting.waiting() != [1]:
                time.sleep(0.01)
            quick.step(lambda name: gradient(0, 2, name))

        together(lambda: late.step(lambda name: gradient(1, 0, name)), follow)
        assert quick.ranks[0].exchanges[-1].islands == late.ranks[0].exchanges[-1].islands == [0, 1]
        assert all(torch.equal(quick.weights()[n], late.weights()[n]) for n in SHAPES)
        for island in islands:
            island.close()


@pytest.mark.parametrize("meshes", [("one", "one"), ("columns", "stages")])
def test_server_that_ends_and_returns_loses_nothing(
    meshes: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outer = lock_step(every=2, fragments=2, quantize="int8")

    def run(state: Path, ends: bool) -> list[dict[str, Tensor]]:
        with serving(state) as server:
            port = server.port
            islands = [Island(port, i, outer, start(), m) for i, m in enumerate(meshes)]
            for island in islands:
                island.join()
            train(islands, range(5))
            if not ends:
                train(islands, range(5, 10))
        if ends:

            def restart() -> None:
                with serving(state, port):
                    trained.wait()

            trained = threading.Event()
            thread = threading.Thread(target=restart)

            def go_on() -> None:
                train(islands, range(5, 10))
                trained.set()

            together(go_on, lambda: (thread.start(), thread.join()))
        for island in islands:
            island.close(finished=False)
        return [island.weights() for island in islands]

    with caplog.at_level(logging.WARNING):
        disturbed = run(tmp_path / "a", True)
    text = caplog.text
    assert "cannot reach the server" in text
    assert "reaches the server again" in text
    for found, wanted in zip(disturbed, run(tmp_path / "b", False), strict=True):
        assert all(torch.equal(found[n], wanted[n]) for n in SHAPES)


def test_island_that_is_lost_is_not_waited_for_and_comes_back() -> None:
    outer = lock_step(every=1, optimizer="average", quantize="none", min_islands=1)
    with serving() as server:
        islands = [Island(server.port, i, outer, start()) for i in range(2)]
        islands[0].ranks[0].step = 7  # of a checkpoint from which its fit goes on
        for island in islands:
            island.join()
        train(islands, range(2))
        islands[1].close(finished=False)
        train(islands[:1], range(2, 5))
        assert islands[0].ranks[0].exchanges[-1].islands == [0]
        again = Island(server.port, 1, outer, start(seed=9), incarnation="second")
        again.join()
        assert again.ranks[0].step == 7 + 5
        assert all(torch.equal(again.weights()[n], islands[0].weights()[n]) for n in SHAPES)
        train([islands[0], again], range(5, 7))
        assert islands[0].ranks[0].exchanges[-1].islands == [0, 1]
        assert all(torch.equal(again.weights()[n], islands[0].weights()[n]) for n in SHAPES)
        for island in (islands[0], again):
            island.close()


def test_island_of_another_run_is_refused_with_the_difference() -> None:
    with serving() as server:
        first = Island(server.port, 0, lock_step(), start())
        first.join()
        said = "every=3 here, every=50 on the server; quantize='none' here, quantize='int8' on the"
        with pytest.raises(IslandError, match=said):
            Island(server.port, 1, lock_step(every=3, quantize="none"), start()).join()
        with pytest.raises(
            IslandError, match=r"float32. on this island, but on the server .*float64"
        ):
            Island(server.port, 1, lock_step(), start(dtype=torch.float32)).join()
        first.close()


def test_server_that_is_away_is_an_error_after_the_timeout() -> None:
    with serving() as server:
        port = server.port
    outer = Outer(timeout=0.3)
    with pytest.raises(IslandError, match=f"island 0 could not reach its server .*:{port}"):
        Island(port, 0, outer, start()).join()


def test_weight_that_is_not_finite_is_not_sent() -> None:
    with serving() as server:
        island = Island(server.port, 0, Outer(every=1, **FAST), start())
        island.join()
        island.parts[0][next(iter(island.parts[0]))].view(-1)[0] = math.nan
        with pytest.raises(NonFiniteError, match="a has NaN or infinite entries"):
            island.step(None)
        island.close(finished=False)
        held = server.meeting.weights
        assert held is not None
        assert [fragment.version for fragment in held.fragments] == [0]


def test_stranger_changes_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, caplog.at_level(logging.WARNING):
        island = Island(server.port, 0, Outer(every=1, **FAST), start())
        island.join()
        before = {n: t.clone() for n, t in server.meeting.weights.exact.items()}
        with pytest.raises(IslandError, match="as it does if the keys differ"):
            Island(server.port, 1, Outer(timeout=0.2), start(), key=b"a guess of a key").join()
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: weights\r\n\r\n" + bytes(64))
            received = stranger.recv(1000)
            assert len(received) == 36  # a magic word and a random number
            assert stranger.recv(1000) == b""
        assert all(torch.equal(server.meeting.weights.exact[n], before[n]) for n in SHAPES)
        island.step(lambda name: gradient(0, 0, name))
        island.close()
    assert caplog.text.count("the other side has a different key") >= 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"op": "drop table"}, "the message 'drop table' is not expected"),
        ({"op": "seed"}, "the message 'seed' is not expected"),
        ({"fragment": 7}, "the update in the message is not valid"),
        ({"samples": -1}, "the update in the message is not valid"),
        ({"pace": 0.5}, "the update in the message is not valid"),
        ({"base": None}, "the update in the message is not valid"),
        ({"payload": bytes(5)}, "too few for"),
        ({"payload": bytes(10_000)}, r"but needs|bytes are allowed"),
        ({"payload": b"\xff" * 8 * (35 + 300 + 66)}, "NaN or infinite"),
    ],
)
def test_message_that_cannot_be_is_refused(
    change: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as server, caplog.at_level(logging.WARNING):
        island = Island(server.port, 0, Outer(every=1, quantize="none", **FAST), start())
        island.join()
        held = server.meeting.weights
        assert held is not None
        before = {n: t.clone() for n, t in held.exact.items()}
        channel = island.ranks[0]._clients[0]._channel
        assert channel is not None
        payload = change.pop("payload", bytes(8 * (35 + 300 + 66)))
        header = {
            "op": "move",
            "fragment": 0,
            "ticket": "t",
            "base": ["", 0],
            "samples": 1,
            "step": 1,
            "pace": 1,
        }
        with suppress(OSError):  # a server that refuses may cut it off
            channel.send({**header, **change}, payload)
        with pytest.raises(OSError):  # noqa: PT011 - the system says it in several ways
            channel.receive()
        island.close(finished=False)
        assert all(torch.equal(held.exact[n], before[n]) for n in SHAPES)
    assert re.search(f"island 0 rank 0: .*{text}", caplog.text)


def test_model_of_an_impossible_step_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, caplog.at_level(logging.WARNING):
        island = Island(server.port, 0, Outer(timeout=0.1), start())
        island.ranks[0].step = -1
        with pytest.raises(IslandError, match="could not reach its server"):
            island.join()
        assert server.meeting.weights is None
        island.close(finished=False)
    assert "the model in the message is not valid: ValueError('-1 is not a whole" in caplog.text


def test_encrypted_connections(tmp_path: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += f" -keyout {tmp_path}/key.pem -out {tmp_path}/cert.pem -subj /CN=localhost"
    command += " -addext subjectAltName=DNS:localhost"
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no certificate: {error}")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with serving(tls=context) as server:
        address = f"localhost:{server.port}"
        outer = Outer(every=1, ca_file=str(tmp_path / "cert.pem"), min_islands=2, **FAST)
        islands = [Island(address, i, outer, start()) for i in range(2)]
        for island in islands:
            island.join()
        train(islands, range(2))
        assert islands[0].ranks[0].exchanges[-1].islands == [0, 1]
        for island in islands:
            island.close()
        system = Outer(
            every=1, min_islands=2, ca_file=ssl.get_default_verify_paths().cafile, **FAST
        )
        if system.ca_file is not None:
            with pytest.raises(IslandError, match="CERTIFICATE_VERIFY_FAILED"):
                Island(address, 1, system, start()).join()


def test_a_closed_server_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with serving() as server:
        island = Island(server.port, 0, Outer(every=1, **FAST), start())
        island.join()
    island.close(finished=False)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("mesh", ["one", "stages"])
def test_what_movements_are_like_is_told_to_all(mesh: str) -> None:
    outer = lock_step(every=1, optimizer="average", quantize="none", min_islands=2)
    with serving() as server:
        islands = [Island(server.port, i, outer, start(), m) for i, m in enumerate(["one", mesh])]
        together(*(island.join for island in islands))
        together(*(lambda i=i: i.step(lambda n: gradient(i.number, 0, n)) for i in islands))
        moved = [torch.cat([gradient(i, 0, n).flatten() for n in SHAPES]) for i in range(2)]
        mean = (moved[0] + moved[1]) / 2
        for rank in [rank for island in islands for rank in island.ranks]:
            (exchange,) = rank.exchanges
            assert (exchange.step, exchange.fragment, exchange.islands) == (1, 0, [0, 1])
            assert (exchange.late, exchange.staleness) == ([], 0)
            for seen, own in zip(exchange.movements, moved, strict=True):
                cosine = torch.nn.functional.cosine_similarity(own, mean, 0)
                assert seen.norm == pytest.approx(float(own.norm()), rel=1e-12)
                assert seen.agreement == pytest.approx(float(cosine), rel=1e-12)
        for island in islands:
            island.close()


def test_a_slower_island_makes_fewer_steps_of_each_round() -> None:
    """Steps of a tenth of a second beside steps of none: both come at about the same time."""
    outer = lock_step(every=40, adapt=True, optimizer="average", quantize="none", min_islands=2)
    with serving() as server:
        fast, slow = (Island(server.port, i, outer, start()) for i in range(2))
        together(fast.join, slow.join)
        made = [0, 0]

        def train(island: Island, seconds: float) -> None:
            while island.ranks[0].rounds < 4:
                time.sleep(seconds)
                island.step(lambda name: gradient(island.number, made[island.number], name))
                made[island.number] += 1

        together(lambda: train(fast, 0.002), lambda: train(slow, 0.1))
        # The first round has `every` of both, as nobody knows better yet.
        assert made[0] == 4 * 40
        assert 40 + 3 <= made[1] <= 40 + 3 * 20
        assert slow.ranks[0].step >= made[0]
        for name in SHAPES:
            assert torch.equal(fast.weights()[name], slow.weights()[name])
        for island in (fast, slow):
            island.close()
