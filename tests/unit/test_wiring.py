"""Ports, arguments and environment of one rank, against literal lists; and what an engine's end means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import model_config, ring_plan

from shardbox import EngineConfig, PortsConfig, RankWiring, Route, diagnose, engine_environment, wire_rank

PATH = "/srv/my models/m.gguf"


def wire(rank: int, *windows: int, block: int = 0, ports: PortsConfig = PortsConfig(), **more: Any) -> RankWiring:  # noqa: B008
    engine = more.pop("engine", EngineConfig())
    plan = ring_plan(*windows, block=block, slots=more.get("slots", 1))
    return wire_rank(plan, rank, ports=ports, engine=engine, model=model_config(**more), path=PATH)


# --- arguments ---

LEADER = ["-c", "128", "-np", "1", "-a", "m", "--host", "127.0.0.1", "--port", "9032", "--no-context-shift"]
LEADER += ["--metrics"]


def start(threads: int = 4) -> list[str]:
    return ["-m", "/srv/my models/m.gguf", "-t", str(threads), "-ngl", "0"]


def ring(world: int, rank: int, windows: str) -> list[str]:
    return [
        *("--world", str(world), "--rank", str(rank), "--master", "127.0.0.1", "--next", "127.0.0.1"),
        *("--data-port", "9000", "--signal-port", "10000", "-lw", windows),
    ]


def test_args_of_one_node_alone_name_no_ring() -> None:
    wiring = wire(0, 8)
    assert list(wiring.args) == [*start(8), *LEADER]
    assert (wiring.role, wiring.http_port, wiring.routes) == ("leader", 9032, ())


def test_args_of_leader_in_a_world_of_two() -> None:
    assert list(wire(0, 5, 3).args) == [
        *("-m", "/srv/my models/m.gguf", "-t", "8", "-ngl", "0", "-c", "128", "-np", "1", "-a", "m"),
        *("--host", "127.0.0.1", "--port", "9032", "--no-context-shift", "--metrics"),
        *("--world", "2", "--rank", "0", "--master", "127.0.0.1", "--next", "127.0.0.1"),
        *("--data-port", "9000", "--signal-port", "10000", "-lw", "5,3"),
    ]


def test_args_of_worker_in_a_world_of_two() -> None:
    assert list(wire(1, 5, 3).args) == [
        *("-m", "/srv/my models/m.gguf", "-t", "8", "-ngl", "0"),
        *("--world", "2", "--rank", "1", "--master", "127.0.0.1", "--next", "127.0.0.1"),
        *("--data-port", "9000", "--signal-port", "10000", "-lw", "5,3"),
    ]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_args_in_a_world_of_three(rank: int) -> None:
    assert list(wire(rank, 4, 3, 1).args) == [*start(8), *(LEADER if rank == 0 else []), *ring(3, rank, "4,3,1")]


def test_args_of_slots_and_embeddings_go_to_the_leader_alone() -> None:
    leader, worker = (wire(rank, 5, 3, slots=4, embeddings=True).args for rank in (0, 1))
    assert leader[leader.index("-c") + 1] == "512"  # the context of all slots together
    assert leader[leader.index("-np") + 1] == "4"
    assert {"--embeddings", "--cont-batching"} <= set(leader)
    assert not {"--embeddings", "--cont-batching", "-c", "-np", "-a", "--port"} & set(worker)


def test_args_from_the_toml_come_last_on_every_rank() -> None:
    engine = EngineConfig(args=("--gpu-mem", "10", "--flash-attn"))
    for rank in (0, 1):
        assert wire(rank, 5, 3, engine=engine).args[-3:] == ("--gpu-mem", "10", "--flash-attn")


# --- ports ---


def test_ports_of_ranks_count_up_from_the_bases() -> None:
    found = [wire(rank, 4, 3, 1) for rank in range(3)]
    assert [(one.data_port, one.signal_port, one.http_port) for one in found] == [
        (9000, 10000, 9032),
        (9001, 10001, 0),
        (9002, 10002, 0),
    ]


def test_ports_of_the_third_model_start_two_blocks_on() -> None:
    wiring = wire(1, 5, 3, block=2)
    assert (wiring.data_port, wiring.signal_port) == (9000 + 128 + 1, 10000 + 128 + 1)
    assert wiring.args[wiring.args.index("--data-port") + 1] == "9128"
    assert wiring.args[wiring.args.index("--signal-port") + 1] == "10128"
    assert wire(0, 5, 3, block=2).http_port == 9128 + 32


def test_ports_come_from_the_own_box() -> None:
    wiring = wire(0, 5, 3, ports=PortsConfig(data=9500, signal=20000))
    assert (wiring.data_port, wiring.signal_port, wiring.http_port) == (9500, 20000, 9532)
    assert [route.port for route in wiring.routes] == [9501, 20001]


def test_routes_stand_for_every_other_rank() -> None:
    """Not only for the next rank and the leader: Prima may dial past a rank that it leaves out."""
    assert wire(1, 4, 3, 1).routes == (
        Route(kind="data", rank=0, node="alpha", port=9000),
        Route(kind="signal", rank=0, node="alpha", port=10000),
        Route(kind="data", rank=2, node="gamma", port=9002),
        Route(kind="signal", rank=2, node="gamma", port=10002),
    )


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_routes_and_own_ports_never_meet(world: int) -> None:
    for rank in range(world):
        wiring = wire(rank, *(2,) * world)
        dialled = [route.port for route in wiring.routes]
        assert len(dialled) == 2 * (world - 1)
        assert len(set(dialled)) == len(dialled)
        assert not {wiring.data_port, wiring.signal_port, wiring.http_port} & set(dialled)


# --- environment ---

OURS = {
    "PATH": "/usr/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "1",
    "LD_LIBRARY_PATH": "/tmp/_MEI1234",
    "LD_PRELOAD": "/tmp/evil.so",
    "PYTHONPATH": "/opt/x",
    "PYTHONHOME": "/opt/y",
    "HTTP_PROXY": "http://proxy:3128",
    "https_proxy": "http://proxy:3128",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t",
    "SHARDBOX_CONFIG": "/etc/shardbox.toml",
    "SHARDBOX_STATE": "/var/lib/x",
    "_PYI_ARCHIVE_FILE": "/usr/bin/shardbox",
}


def test_environment_is_a_short_list() -> None:
    assert engine_environment(OURS, EngineConfig(), {}) == {
        "PATH": "/usr/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "1",
    }


def test_environment_of_nothing_has_a_path() -> None:
    """Cron and service managers start things with nothing at all."""
    assert engine_environment({}, EngineConfig(), {}) == {"PATH": "/usr/local/bin:/usr/bin:/bin"}


def test_environment_library_path_comes_from_lib_alone() -> None:
    assert engine_environment(OURS, EngineConfig(lib="/opt/lib"), {})["LD_LIBRARY_PATH"] == "/opt/lib"
    assert "LD_LIBRARY_PATH" not in engine_environment(OURS, EngineConfig(), {})


def test_environment_of_the_toml_wins() -> None:
    engine = EngineConfig(lib="/opt/lib", env={"CUDA_VISIBLE_DEVICES": "0", "GGML_CUDA_NO_VMM": "1", "EMPTY": ""})
    found = engine_environment(OURS, engine, {"GGML_CUDA_NO_VMM": "0", "EXTRA": "x"})
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert found["GGML_CUDA_NO_VMM"] == "1"
    assert (found["EMPTY"], found["EXTRA"]) == ("", "x")


@given(st.dictionaries(st.from_regex(r"\A[A-Za-z_][A-Za-z_0-9]{0,12}\Z") | st.sampled_from(sorted(OURS)), st.text()))
def test_environment_never_passes_on_what_is_not_listed(base: dict[str, str]) -> None:
    found = engine_environment(base, EngineConfig(), {})
    for name in found:
        assert not name.upper().startswith(("PYTHON", "LD_", "SHARDBOX", "_PYI", "HTTP"))
        assert "SECRET" not in name.upper()
        assert name == "PATH" or found[name] == base[name]


def test_environment_leaves_its_arguments_alone() -> None:
    base, engine, extra = dict(OURS), EngineConfig(env={"A": "1"}), {"B": "2"}
    engine_environment(base, engine, extra)["C"] = "3"
    assert (base, engine.env, extra) == (OURS, {"A": "1"}, {"B": "2"})


# --- diagnosis ---


@pytest.mark.parametrize(
    ("code", "tail", "words"),
    [
        (1, ["Error binding/connecting recv socket to tcp://*:9001: Address already in use"], "its port is taken"),
        (1, ["srv: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 9032"], "its HTTP port is taken"),
        (1, ["ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory"], "out of memory"),
        (-6, ["terminate called after throwing an instance of 'std::bad_alloc'"], "out of memory"),
        (1, ["ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9"], "out of memory"),
        (1, ["tensor 'blk.3' data is not within the file bounds, model is corrupted"], "the model file is cut short"),
        (1, ["error loading model: unknown model architecture: 'qwen9'"], "this Prima does not know the model's "),
        (134, ["gguf_init_from_file: failed to read key-value pairs"], "the model file is cut short"),
        (134, ["gguf_init_from_file: invalid magic characters 'hell'"], "the model file is no GGUF"),
        (
            134,
            ["gguf_init_from_file: failed to open 'absent.gguf': 'No such file or directory'"],
            "the model file is missing",
        ),
        (134, ["gguf_init_from_file: failed to open 'm.gguf': 'Permission denied'"], "the model file may not be read"),
        (139, ["llm_load_tensors: error loading model: mmap failed: Cannot allocate memory"], "out of memory"),
        (1, ["CUDA error: no kernel image is available for execution on the device"], "the engine was built for anoth"),
        (
            1,
            ["llama-cli: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by llama-cli)"],
            "the engine was built on a newer system: it wants GLIBC_2.38",
        ),
        (1, ["llama_load_model_from_file: failed to load model from /m.gguf"], "the model could not be loaded"),
        (1, ["gguf_init_from_file: failed to open '/m.gguf'"], "the model could not be loaded"),
        (1, ["CUDA driver version is insufficient for CUDA runtime version"], "the NVIDIA driver is older"),
        (127, ["llama-cli: error while loading shared libraries: libzmq.so.5: cannot open"], "a shared library is"),
        (-6, ["GGML_ASSERT(should_profile) failed"], "it met a ring that was already running"),
        (1, ["error: unknown argument: --fast"], "it does not know one of the flags"),
        (1, ["error: invalid argument: --fast"], "it does not know one of the flags"),
    ],
)
def test_diagnose_known_output_gives_words_and_the_line(code: int, tail: list[str], words: str) -> None:
    found = diagnose(code, ["loading", *tail, "", "bye"])
    assert found.startswith(words)
    assert found.endswith(f"[{tail[0][:160]}]")


@pytest.mark.parametrize(
    ("code", "tail", "found"),
    [
        (-9, ["all fine"], "killed (for lack of memory, or by hand)"),
        (137, ["all fine"], "killed (for lack of memory, or by hand)"),
        (-15, ["all fine"], "it was told to end"),
        (143, [], "it was told to end"),
        (-11, ["ggml: row 3", ""], "it crashed (segmentation fault) [ggml: row 3]"),
        (139, [], "it crashed (segmentation fault)"),
        (-4, [], "illegal instruction: the binary was built for another processor"),
        (132, ["x"], "illegal instruction: the binary was built for another processor [x]"),
        (-6, [], "it aborted"),
        (-31, [], "signal 31"),
        (0, [], "it ended with exit code 0"),
        (3, ["", "   ", "last words  ", " "], "it ended with exit code 3 [last words]"),
        (128, [], "it ended with exit code 128"),
        (1, ["x" * 500], f"it ended with exit code 1 [{'x' * 160}]"),
    ],
)
def test_diagnose_exit_code_alone_gives_words(code: int, tail: list[str], found: str) -> None:
    assert diagnose(code, tail) == found


@pytest.mark.parametrize("code", [-9, 137])
def test_diagnose_killed_asks_whether_the_kernel_did_it(code: int) -> None:
    assert (
        diagnose(code, ["x"], 1)
        == "killed by the kernel, out of memory: lower this node's cap, the context or the layers"
    )
    assert diagnose(code, ["x"], 0) == "killed by hand"
    assert diagnose(-11, [], 1) == "it crashed (segmentation fault)"


def test_diagnose_names_what_the_line_names() -> None:
    assert "architecture, qwen9 [" in diagnose(134, ["unknown model architecture: 'qwen9'"])
    assert "missing, libzmq.so.5: " in diagnose(127, ["error while loading shared libraries: libzmq.so.5: cannot"])


def test_diagnose_first_cause_wins_over_what_follows_from_it() -> None:
    tail = ["failed to allocate buffer", "failed to load model from /m.gguf", "error: invalid argument: x"]
    assert diagnose(1, tail).startswith("out of memory")


@given(st.integers(-64, 255), st.lists(st.text(max_size=300), max_size=5))
def test_diagnose_anything_is_one_short_answer(code: int, tail: list[str]) -> None:
    assert 0 < len(diagnose(code, tail)) < 300
