"""A worker that speaks the channel and does what a job's prompt says, without torch.

It is a real process, so that deaths, hangs and broken messages are real. Prompts: `echo`,
`steps N` (10 ms each, cancellable, gives way between two), `hang` (until cancelled), `deaf` (never
looks at a cancel), `exit N`, `kill SIGNAL`, `big BYTES`, `error CODE`. Sources of models: `/good`,
`/bad` (cannot be described), `/broken` (cannot be loaded), `/slow` (takes 0.3 s to load), `/deadly`
(loading kills).
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from offload_protocol.records import ComponentInfo, ErrorInfo, Outcome, Timings
from offloadd.channel.framing import ChannelClosed, Frame, WorkerEnd
from offloadd.channel.messages import (
    CancelJob,
    DeviceReport,
    FromWorker,
    GiveWay,
    JobEnded,
    JobParked,
    JobProgressed,
    LoadModel,
    ModelDescribed,
    ModelFailed,
    ModelLoaded,
    ModelUnloaded,
    ParameterInfo,
    Register,
    ResumeJob,
    RunJob,
    UnloadModel,
    WorkerOrder,
)

PARAMETERS = [
    ParameterInfo(name="prompt", kinds=["str", "list"], required=True),
    ParameterInfo(name="num_inference_steps", kinds=["int"]),
    ParameterInfo(name="height", kinds=["int", "none"]),
    ParameterInfo(name="width", kinds=["int", "none"]),
    ParameterInfo(name="guidance_scale", kinds=["float"]),
    ParameterInfo(name="image", kinds=["image", "array"]),
]


class Channel(WorkerEnd):
    """A channel whose end ends the worker, whichever thread notices it first."""

    def send(self, message: FromWorker, frames: Sequence[Frame] = ()) -> None:
        try:
            super().send(message, frames)
        except ChannelClosed:
            os._exit(0)


class ScriptedWorker:
    def __init__(self, channel: WorkerEnd, device: str) -> None:
        self.channel = channel
        self.device = device
        self.orders: queue.Queue[tuple[WorkerOrder, list[bytearray]]] = queue.Queue()
        self.sources: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.to_give_way: set[str] = set()
        self.changed = threading.Condition()
        self.resumed: set[str] = set()

    def receive(self) -> None:
        try:
            while True:
                message, frames = self.channel.receive()
                with self.changed:
                    match message:
                        case CancelJob(job=job):
                            self.cancelled.add(job)
                        case GiveWay(job=job):
                            self.to_give_way.add(job)
                        case ResumeJob(job=job):
                            self.resumed.add(job)
                        case _:
                            self.orders.put((message, frames))
                    self.changed.notify_all()
        except ChannelClosed:
            os._exit(0)

    def run(self) -> None:
        threading.Thread(target=self.receive, daemon=True).start()
        self.channel.send(
            DeviceReport(
                device=self.device, name="scripted", total_bytes=1000, free_bytes=900, host_bytes=5
            )
        )
        while True:
            message, frames = self.orders.get()
            match message:
                case Register():
                    self.register(message)
                case LoadModel():
                    self.load(message.name, is_asked=True)
                case UnloadModel():
                    self.channel.send(ModelUnloaded(name=message.name))
                case RunJob():
                    threading.Thread(target=self.job, args=(message, frames), daemon=True).start()

    def register(self, message: Register) -> None:
        name, source = message.spec.name, message.spec.source
        if source == "/bad":
            error = ErrorInfo(code="model_load_failed", message="/bad is not a pipeline")
            self.channel.send(ModelFailed(name=name, error=error))
            return
        self.sources[name] = source
        self.channel.send(
            ModelDescribed(
                name=name,
                pipeline="ScriptedPipeline",
                dtype="float32",
                offload="none",
                components=[ComponentInfo(name="unet", bytes=100)],
                parameters=PARAMETERS,
            )
        )

    def load(self, name: str, is_asked: bool) -> ErrorInfo | None:
        source = self.sources[name]
        if source == "/deadly":
            print("loading was too much", file=sys.stderr, flush=True)
            # Not `os.kill`, which another thread may die of while this one says that it has loaded.
            signal.raise_signal(signal.SIGSEGV)
        if source == "/broken":
            error = ErrorInfo(code="model_load_failed", message="/broken/unet is truncated")
            self.channel.send(ModelFailed(name=name, error=error))
            return error
        if source == "/slow":
            time.sleep(0.3)
        if is_asked:
            print(f"loading {name}", file=sys.stderr, flush=True)
        components = [ComponentInfo(name="unet", bytes=100, resident_bytes=100)]
        self.channel.send(
            ModelLoaded(name=name, offload="none", components=components, loading_s=0.01)
        )
        return None

    def park(self, job: str) -> bool:
        """Wait for the next turn; False where the job was cancelled instead."""
        with self.changed:
            self.to_give_way.discard(job)
            self.resumed.discard(job)
            self.channel.send(JobParked(job=job))
            self.changed.wait_for(lambda: job in self.resumed or job in self.cancelled)
            return job not in self.cancelled

    def stopped(self, job: str) -> None:
        error = ErrorInfo(code="cancelled", message="stopped at a border")
        self.channel.send(JobEnded(job=job, error=error))

    def job(self, message: RunJob, frames: list[bytearray]) -> None:
        if message.awaits_turn:
            error = self.load(message.model, is_asked=False)
            if error is not None:
                self.channel.send(JobEnded(job=message.job, error=error))
                return
            if not self.park(message.job):
                self.stopped(message.job)
                return
        prompt = message.arguments["prompt"]
        word, _, rest = str(prompt).partition(" ")
        match word:
            case "steps":
                self.steps(message, int(rest))
            case "hang":
                self.steps(message, 1_000_000)
            case "deaf":
                time.sleep(1000)
            case "exit":
                print("the last words", file=sys.stderr, flush=True)
                os._exit(int(rest))
            case "kill":
                os.kill(os.getpid(), signal.Signals[rest])
            case "garbage":
                self.channel._socket.sendall(b"\x01\0\0\0\x01\0\0\0\0\0\0\0\xc1")
            case "error":
                error = ErrorInfo(code=rest, message=f"told to say {rest}")
                self.channel.send(JobEnded(job=message.job, error=error))
            case "big":
                array = {"$array": 0, "dtype": "uint8", "shape": [int(rest)]}
                self.ended(message, [bytes(int(rest))], big=array)
            case _:
                self.ended(message, list(frames))

    def steps(self, message: RunJob, count: int) -> None:
        job = message.job
        for step in range(1, count + 1):
            if job in self.cancelled or (job in self.to_give_way and not self.park(job)):
                self.stopped(job)
                return
            time.sleep(0.01)
            self.channel.send(JobProgressed(job=job, state="running", step=step, steps=count))
        self.channel.send(
            JobEnded(job=job, outcome=Outcome(outputs={"steps": count}, seeds=[message.seed]))
        )

    def ended(
        self, message: RunJob, frames: list[bytes] | list[bytearray], **outputs: object
    ) -> None:
        outputs |= {"arguments": message.arguments, "pid": os.getpid(), "frames": len(frames)}
        outcome = Outcome(outputs=outputs, seeds=[message.seed], timings=Timings(running_s=0.5))
        self.channel.send(JobEnded(job=message.job, outcome=outcome), frames)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--late-s", type=float, default=0.0)
    parser.add_argument("--die-at-start", action="store_true")
    options = parser.parse_args()
    if options.die_at_start:
        print("no device here", file=sys.stderr, flush=True)
        os._exit(20)
    time.sleep(options.late_s)
    channel = Channel(socket.socket(fileno=options.channel_fd))
    ScriptedWorker(channel, options.device).run()


if __name__ == "__main__":
    main()
