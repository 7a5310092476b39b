"""A real ring, bare against through shardbox: a part of `make bench` where SHARDBOX_PRIMA and SHARDBOX_MODEL are set.

Both rings run on this machine with the same engines, flags and layers, one thread a rank. They take turns: while one
answers, the other waits.
"""

import contextlib
import http.client
import json
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import shardbox

PAIRS = int(os.environ.get("BENCH_PAIRS", "7"))
HERE = "127.0.0.1"
RANKS = ("alpha", "beta", "gamma")
TOKENS = 96
LONGER = 5  # so many times the layers, for tokens that take 50 ms or more


def tokens_per_s(port: int) -> float:
    """Of one answer, from the question to its end."""
    question = {"role": "user", "content": "Count from one to three hundred, in words."}
    body = {"messages": [question], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    connection, started = http.client.HTTPConnection(HERE, port, timeout=120), time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    assert reply.status == 200, answer
    return float(answer["usage"]["completion_tokens"]) / (time.perf_counter() - started)


def until_healthy(port: int, process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection(HERE, port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("it has ended")


def longer(path: str, times: int, folder: str) -> str:
    """The model with every layer so many times: nonsense as an answer, but honest work."""
    data = Path(path).read_bytes()
    with open(path, "rb") as file:
        header = shardbox.read_gguf_header(file, len(data), path)
        file.seek(0)
        reader = shardbox._GgufReader(file, len(data), path)
        reader.skip(24)
        for _ in range(struct.unpack_from("<Q", data, 16)[0]):
            shardbox._read_key(reader, {})
    layers = int(str(header.metadata[f"{header.metadata['general.architecture']}.block_count"]))
    count = rb"(\.block_count\x04\0\0\0)...."
    more = struct.pack("<I", layers * times)
    keys = re.sub(count, lambda found: found[1] + more, data[24 : reader.pos], count=1, flags=re.DOTALL)
    numbers = {kind: number for number, (kind, _, _) in shardbox.GGML_TYPES.items()}
    infos, bodies, at = b"", [], 0
    for tensor in header.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(.*)", tensor.name)
        again = range(times) if match else [0]
        for turn in again:
            name = (f"blk.{int(match[1]) + turn * layers}.{match[2]}" if match else tensor.name).encode()
            infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.dims))
            infos += struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, numbers[tensor.type], at)
            start = header.data_offset + tensor.offset
            bodies.append(data[start : start + tensor.bytes] + bytes(-tensor.bytes % 32))
            at += len(bodies[-1])
    tensors = sum(times if tensor.name.startswith("blk.") else 1 for tensor in header.tensors)
    head = data[:8] + struct.pack("<Q", tensors) + data[16:24] + keys + infos
    made = os.path.join(folder, "longer.gguf")
    with open(made, "wb") as file_:
        file_.write(head + bytes(-len(head) % 32))
        file_.writelines(bodies)
    return made


def configuration(folder: str, model: str, layers: int) -> tuple[str, list[int], list[list[str]]]:
    """(the TOML's path, endpoints of the nodes, argv of each rank of the bare ring)."""
    ports = shardbox.free_port_blocks(len(RANKS) + 1)
    engines, lib = os.environ["SHARDBOX_PRIMA"], os.environ.get("SHARDBOX_PRIMA_LIB", "")
    lines = ["[cluster]", f'name = "ring-{ports[0]}"', 'secret = "a bench needs no better secret than this"']
    lines += ['discovery = "static"', 'interfaces = ["lo"]', "[engine]", f'path = "{engines}"', f'lib = "{lib}"']
    lines += ["threads = 1"]
    for n, name in enumerate(RANKS):
        mesh, api, data, signals = ports[4 * n : 4 * n + 4]
        lines += ["[[nodes]]", f'name = "{name}"', f'address = "{HERE}"']
        lines += [f"ports = {{mesh = {mesh}, api = {api}, data = {data}, signal = {signals}}}"]
    share = {name: layers // len(RANKS) for name in RANKS}
    share[RANKS[0]] += layers % len(RANKS)
    lines += ["[[models]]", 'name = "m"', f'path = "{model}"', "context = 512", 'leader = "alpha"']
    lines += [f"layers = {{{', '.join(f'{name} = {count}' for name, count in share.items())}}}"]
    path = os.path.join(folder, "shardbox.toml")
    text = "\n".join([*lines, ""])
    Path(path).write_text(text)
    config = shardbox.parse_config(text.encode(), file=path, folder=folder)
    windows = ",".join(map(str, share.values()))
    bare = []
    for rank in range(len(RANKS)):
        data, signals = ports[-2:]
        flags = f"-m {model} -t 1 -ngl 0 --world 3 --rank {rank} --master {HERE} --next {HERE} -lw {windows}"
        flags += f" --data-port {data} --signal-port {signals}"
        if rank == 0:
            flags += f" -c {config.models[0].context} -np 1 --host {HERE} --port {ports[-3]}"
            flags += " --no-context-shift --metrics"
        bare.append([os.path.join(engines, "llama-server" if rank == 0 else "llama-cli"), *flags.split()])
    return path, [*ports[1:-4:4], ports[-3]], bare


@contextlib.contextmanager
def both(model: str, layers: int, command: list[str]) -> Iterator[tuple[int, int]]:
    """The endpoints of the bare ring and of the cluster, both ready."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config, ports, bare = configuration(folder, model, layers)
        env = {**os.environ, "SHARDBOX_STATE": os.path.join(folder, "state"), "SHARDBOX_LOG": "error"}
        env["LD_LIBRARY_PATH"] = os.environ.get("SHARDBOX_PRIMA_LIB", "")
        argvs = [*bare, *([*command, "up", "--config", config, "--node", name] for name in RANKS)]
        started = []
        for argv in argvs:
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(argv, env=env, stdin=quiet, stdout=quiet, stderr=quiet, cwd=folder)
            stack.callback(process.wait)
            stack.callback(process.terminate if argv not in bare else process.kill)
            started.append(process)
        until_healthy(ports[-1], started[0])
        until_healthy(ports[0], started[len(bare)])
        yield ports[-1], ports[0]


def ring(command: list[str]) -> dict[str, float]:
    """Tokens/s of both and the ratio, for the model as it is and with more layers; nothing without an engine."""
    model = os.environ.get("SHARDBOX_MODEL", "")
    if not os.environ.get("SHARDBOX_PRIMA") or not model:
        print("no real ring: SHARDBOX_PRIMA and SHARDBOX_MODEL are not set")
        return {}
    result = {}
    with open(model, "rb") as file:
        header = shardbox.read_gguf_header(file, os.path.getsize(model), model)
    layers = shardbox.model_shape([header]).layers
    with tempfile.TemporaryDirectory() as folder:
        for label, times in (("", 1), (f", {LONGER} times the layers", LONGER)):
            path = model if times == 1 else longer(model, times, folder)
            with both(path, layers * times, command) as (bare, through):
                seen: dict[int, list[float]] = {bare: [], through: []}
                for port in seen:
                    tokens_per_s(port)  # warm up
                for _ in range(PAIRS):
                    for port in random.sample([*seen], 2):
                        seen[port].append(tokens_per_s(port))
            result[f"bare, tokens/s{label}"] = statistics.median(seen[bare])
            result[f"through shardbox, tokens/s{label}"] = statistics.median(seen[through])
            pairs = zip(seen[through], seen[bare], strict=True)
            result[f"ratio{label}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return result


if __name__ == "__main__":
    print(json.dumps(ring([sys.executable, str(Path(shardbox.__file__).resolve())]), indent=2))
