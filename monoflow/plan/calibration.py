"""What `monoflow calibrate` measured on this machine, and the file that keeps it.

One file for each way to fill the machine: with how many ranks, of how many threads each. Ranks of one host
share its cores and memory, so a rank's rates depend on how many there are.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..boxing.curve import Curve
from ..boxing.route import LinkCost
from ..config import Settings
from ..errors import PlanError
from .cost import Device, Machine

_FORMAT = "monoflow calibration 3"


class _OtherFormat(ValueError):
    """A file that another version wrote."""


@dataclass(frozen=True)
class Setting:
    """What a calibration holds for.

    Attributes:
        device_type: a torch device type.
        device: the vendor's name of the device.
        torch: the version of torch.
        num_ranks: ranks of this host, all busy at once.
        num_threads: threads of a rank on a CPU; 0 elsewhere.
    """

    device_type: str
    device: str
    torch: str
    num_ranks: int
    num_threads: int

    @staticmethod
    def here(device_type: str, num_ranks: int) -> Setting:
        """This machine's with so many ranks, of which this process is one, or which it plans for."""
        threads = _num_threads(num_ranks) if device_type == "cpu" else 0
        return Setting(device_type, device_name(device_type), torch.__version__, num_ranks, threads)

    @property
    def command(self) -> str:
        """What measures it."""
        threads = f"OMP_NUM_THREADS={self.num_threads} " if self.num_threads else ""
        return f"{threads}monoflow calibrate -n {self.num_ranks}"


@dataclass(frozen=True)
class Calibration:
    """A device as measured, and the links between ranks by how many of them a collective joins.

    Attributes:
        links: group size -> cost, measured with all groups of that size at work at once.
        computing, moving: what whole steps were seen to take more than such calls alone, as factors that are
            in the seconds of the device and of the links.
    """

    setting: Setting
    device: Device
    links: Mapping[int, LinkCost]
    computing: float = 1.0
    moving: float = 1.0

    def machine(self, shape: Sequence[int]) -> Machine:
        """The machine of a placement whose axes have these sizes."""
        nothing = LinkCost(0.0, 0.0)
        return Machine(self.device, tuple(self.links[n] if n > 1 else nothing for n in shape))

    def scaled(self, computing: float, moving: float) -> Calibration:
        """One whose computing and moves take so many times as long."""
        device = replace(
            self.device,
            flops={dtype: rate / computing for dtype, rate in self.device.flops.items()},
            bandwidth=self.device.bandwidth / computing,
            launch=self.device.launch * computing,
            curves={key: curve.scaled(computing) for key, curve in self.device.curves.items()},
        )
        links = {size: link.scaled(moving) for size, link in self.links.items()}
        return Calibration(self.setting, device, links, self.computing * computing, self.moving * moving)

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        device = asdict(self.device) | {"curves": {k: c.points for k, c in self.device.curves.items()}}
        links = {str(n): _encode_link(link) for n, link in self.links.items()}
        data = {"format": _FORMAT, "setting": asdict(self.setting), "device": device, "links": links}
        data |= {"computing": self.computing, "moving": self.moving}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(data, indent=1, allow_nan=False))
        partial.replace(path)

    @staticmethod
    def read(path: Path) -> Calibration:
        """Reads a calibration. Raises ValueError, KeyError or TypeError of a file that is damaged."""
        data = json.loads(path.read_text())
        if data["format"] != _FORMAT:
            raise _OtherFormat(f"format {data['format']!r}, here {_FORMAT!r}")
        return Calibration(
            Setting(**data["setting"]),
            Device(**data["device"] | {"curves": _decode_curves(data["device"]["curves"])}),
            {int(n): _decode_link(link) for n, link in data["links"].items()},
            float(data["computing"]),
            float(data["moving"]),
        )

    @staticmethod
    def load(path: Path, setting: Setting) -> Calibration:
        """Reads the calibration of a setting.

        Raises:
            PlanError: the file is damaged, or was made on another device or torch.
        """
        try:
            found = Calibration.read(path)
        except _OtherFormat as error:
            raise PlanError(
                f"the calibration in {path} is stale ({error}); run `{setting.command}`"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"the calibration in {path} is damaged ({type(error).__name__}: {error}); "
                f"run `{setting.command}`"
            ) from None
        was, now = asdict(found.setting), asdict(setting)
        differs = ", ".join(f"{key} {was[key]!r}, here {now[key]!r}" for key in now if was[key] != now[key])
        if differs:
            raise PlanError(f"the calibration in {path} is stale ({differs}); run `{setting.command}`")
        return found


def load_calibration(device_type: str, num_ranks: int) -> Calibration | None:
    """This machine's calibration for so many local ranks with this process' threads; None if there is none.

    Raises:
        PlanError: it is stale or damaged.
    """
    setting = Setting.here(device_type, num_ranks)
    path = calibration_path(setting)
    return Calibration.load(path, setting) if path.is_file() else None


def calibration_path(setting: Setting) -> Path:
    """Where the calibration of a setting is kept: under MONOFLOW_CACHE, else the user's cache folder."""
    threads = f"-{setting.num_threads}-threads" * bool(setting.num_threads)
    name = f"{setting.device_type}-{setting.num_ranks}-ranks{threads}.json"
    return Path(Settings.from_env(os.environ).cache).expanduser() / "calibration" / name


def _num_threads(num_ranks: int) -> int:
    """Threads of a rank: this process' own if it is one of so many, else what `monoflow run` gives each."""
    joined = dist.is_available() and dist.is_initialized()
    if num_ranks == (dist.get_world_size() if joined else 1):
        return torch.get_num_threads()
    return max(1, (os.cpu_count() or 1) // num_ranks)


def device_name(device_type: str) -> str:
    """What the vendor calls this host's device of a type; "" where there is none."""
    if device_type == "cpu":
        return _cpu_name()
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != device_type:
        return ""
    return getattr(torch.get_device_module(here), "get_device_name", str)()


def _cpu_name() -> str:
    """The processor and its number of cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        name = lines[0] if lines else name
    return f"{name} x {os.cpu_count()}"


def _decode_curves(data: Mapping[str, Any]) -> dict[str, Curve]:
    return {key: _decode_curve(points) for key, points in data.items()}


def _decode_curve(points: Sequence[Sequence[float]]) -> Curve:
    return Curve(tuple((float(amount), float(seconds)) for amount, seconds in points))


def _encode_link(link: LinkCost) -> dict[str, Any]:
    plain = {"alpha": link.alpha, "beta": link.beta, "launch": link.launch}
    return plain | {"curves": {kind: curve.points for kind, curve in link.curves}}


def _decode_link(data: Mapping[str, Any]) -> LinkCost:
    curves = [(kind, _decode_curve(points)) for kind, points in data["curves"].items()]
    return LinkCost(float(data["alpha"]), float(data["beta"]), float(data["launch"]), tuple(curves))
