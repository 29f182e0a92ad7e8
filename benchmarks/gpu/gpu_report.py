"""What gpu_step.py's figures say: a table for each list, the targets, a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_candidates import BASE
from gpu_peers import FLASH_24_NAME, FLASH_32_NAME

Entry = dict[str, Any]
Lists = dict[str, dict[str, Any]]

COPY_SHARE = {"one": 0.90, "llama": 0.85}
LAUNCHES = 3  # measure, decide, apply
AGAINST_TORCH = 1.9
TINY_AGAINST_FLASH = {"one": 0.98, "llama": 1.3, "resnet50": 3.0}
READ_SHARE = 0.90
OVERFLOW = 1.1  # of the time of measuring alone
LINK_SHARE = 0.6  # of what copies reach: below it, copies through buffers would be much faster


@dataclass(frozen=True)
class Target:
    """One thing promised; `met` is None where it was not measured."""

    what: str
    wanted: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: "not measured"}[self.met]


def entry(lists: Lists, key: str, name: str) -> Entry | None:
    """A candidate's figures, if it was timed and did what it should."""
    found = lists.get(key, {}).get("candidates", {}).get(name, {})
    return found if "ms" in found and "error" not in found else None


def speed(ours: Entry | None, theirs: Entry | None) -> float | None:
    """How much faster ours is, each time taken in copies of memory measured beside it."""
    if not ours or not theirs:
        return None
    return (theirs["ms"] * theirs["copy_gb_s"]) / (ours["ms"] * ours["copy_gb_s"])


def at_least(what: str, value: float | None, bound: float, unit: str) -> Target:
    """A target that is a lower bound; unit: "x" or "%"."""

    def text(x: float) -> str:
        return f"{x:.2f}x" if unit == "x" else f"{x:.1%}"

    known = value is not None and not math.isnan(value)
    return Target(
        what,
        f">= {text(bound)}",
        text(value) if value is not None and known else "",
        value >= bound if value is not None and known else None,
    )


def targets(lists: Lists) -> list[Target]:
    """All of them, in the order in which they matter."""
    found = (_launches, _bandwidth, _against_torch, _against_flash, _measure)
    return [target for some in found for target in some(lists)]


def _launches(lists: Lists) -> Iterator[Target]:
    exact = entry(lists, "one", "amp_mp exact") or {}
    waits = max(exact["waits"], exact["to_host"]) if "waits" in exact else None
    for what, value, most in (("launches", exact.get("launches"), LAUNCHES), ("waits", waits, 0)):
        # A trace without any kernel has seen nothing.
        known = value is not None and exact["launches"] > 0
        text, met = (str(value), value <= most) if known else ("", None)
        yield Target(f"one: {what} of a step, exact", f"<= {most}", text, met)


def _bandwidth(lists: Lists) -> Iterator[Target]:
    for key, bound in COPY_SHARE.items():
        exact = entry(lists, key, "amp_mp exact")
        what = f"{key}: exact, of copy bandwidth"
        yield at_least(what, exact["share"] if exact else None, bound, "%")


def _against_torch(lists: Lists) -> Iterator[Target]:
    for key in ("one", "llama", "resnet50", "many"):
        value = speed(entry(lists, key, "amp_mp exact"), entry(lists, key, BASE))
        yield at_least(f"{key}: exact against torch's pipeline", value, AGAINST_TORCH, "x")


def _against_flash(lists: Lists) -> Iterator[Target]:
    for key, bound in TINY_AGAINST_FLASH.items():
        value = speed(entry(lists, key, "amp_mp tiny"), entry(lists, key, FLASH_24_NAME))
        yield at_least(f"{key}: tiny against flashoptim 24-bit", value, bound, "x")
    for key in ("one", "llama", "resnet50", "many"):
        value = speed(entry(lists, key, "amp_mp exact"), entry(lists, key, FLASH_32_NAME))
        yield at_least(f"{key}: exact against flashoptim 32-bit", value, 1.0, "x")


def _measure(lists: Lists) -> Iterator[Target]:
    read = lists.get("one", {}).get("ceilings", {}).get("read")
    for dtype in ("bfloat16", "float16", "float32"):
        found = entry(lists, "one", f"amp_mp measure {dtype}")
        value = found["gb_s"] / read if found and read else None
        yield at_least(f"one: measure {dtype}, of reading", value, READ_SHARE, "%")
    for key in ("one", "llama"):
        step = entry(lists, key, "amp_mp exact, overflow")
        alone = entry(lists, key, "amp_mp measure bfloat16")
        ratio = 1 / value if (value := speed(step, alone)) else None
        yield Target(
            f"{key}: overflow step, of measuring alone",
            f"<= {OVERFLOW:.2f}x",
            f"{ratio:.2f}x" if ratio else "",
            ratio <= OVERFLOW if ratio else None,
        )


def as_dicts(found: list[Target]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**asdict(target), "verdict": target.verdict} for target in found]


def verdict_table(found: list[Target]) -> str:
    """The targets, one a line."""
    width = max(len(t.what) for t in found)
    lines = [f"{t.what:<{width}}  {t.wanted:>9}  {t.found:>8}  {t.verdict}".rstrip() for t in found]
    return "\n".join(lines)


def list_table(content: dict[str, Any]) -> str:
    """A list's candidates: times, bytes, bandwidth, kernels and waits; or what went wrong."""
    ceilings = ", ".join(f"{name} {rate:.0f}" for name, rate in content["ceilings"].items())
    lines = [f"{content['title']}. GB/s: {ceilings or 'none measured'}"]
    lines.append(
        f"{'':28}{'ms':>8}{'+-':>5}{'host':>8}{'MB':>7}{'GB/s':>6}{'copy':>6}{'torch':>9}"
        f"{'launch':>7}{'wait':>5}"
    )
    base = content["candidates"].get(BASE, {})
    for name, found in content["candidates"].items():
        if "ms" not in found:
            lines.append(f"{name:<28} {found.get('error', 'not run')[:70]}")
            continue
        against = speed(found, base if "ms" in base else None)
        lines.append(
            f"{name[:28]:<28}{found['ms']:8.3f}{spread(found):>5}{found['host_ms']:8.3f}"
            f"{found['bytes'] / 1e6:7.0f}"
            f"{found['gb_s']:6.0f}{found['share']:6.0%}"
            f"{f'{against:.2f}x' if against else '':>9}"
            f"{found.get('launches', ''):>7}{waits(found):>5}"
        )
        if name.startswith("amp_mp") and (times := found.get("kernel_us")):
            each = (f"{kernel.split('::')[-1]} {us[1]:.1f}" for kernel, us in times.items())
            lines.append(f"    us: {', '.join(each)}"[:110])
        if "error" in found:
            lines.append(f"    {found['error'][:90]}")
    lines += changes_lines(content)
    lines += offload_lines(content)
    if content.get("error"):
        lines.append(content["error"])
    return "\n".join(lines)


def changes_lines(content: dict[str, Any]) -> Iterator[str]:
    """What a step takes while changes are noted, by the same step's time without."""
    lists = {"this": content}
    for name in content["candidates"]:
        plain = name.removesuffix(", changes")
        against = speed(entry(lists, "this", name), entry(lists, "this", plain))
        if plain != name and against:
            yield f"    {name}: {1 / against:.3f} times the time of {plain}"


def offload_lines(content: dict[str, Any]) -> Iterator[str]:
    """What each offloaded step takes here and there, and whether staging is worth building."""
    entries, link = content["candidates"], content["ceilings"].get("link")
    for name, found in entries.items():
        if not link or "link_gb_s" not in found or "error" in found:
            continue
        share = found["link_gb_s"] / link
        beside = entries.get(name.removesuffix(", offload"), {}).get("ms")
        without = f", {beside / 1e3:.3f} s and {found['copy_gb_s']:.0f} GB/s without" * bool(beside)
        worth = "not worth" if share >= LINK_SHARE else "worth"
        yield (
            f"    {name}: {found['ms'] / 1e3:.3f} s, {found['link_gb_s']:.1f} GB/s of the link's "
            f"{link:.1f}{without}; staging through two device buffers is {worth} building"
        )


def spread(found: Entry) -> str:
    """Half of the distance between the quartiles, as a share of the median."""
    first, middle, third = found.get("ms_quartiles", (0.0, 0.0, 0.0))
    return f"{(third - first) / 2 / middle:.0%}" if middle else ""


def waits(found: Entry) -> str:
    """How often the host waits: calls that wait, or copies to the host if those are more."""
    return str(max(found["waits"], found["to_host"])) if "waits" in found else ""


def picture(lists: Lists, gpu: str, path: Path) -> None:
    """Share of the copy bandwidth by candidate, a panel for each list."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"amp_mp": "#1f6fb4", "torch": "#9a9a9a"}
    figure, panels = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    for panel, content in zip(panels.flat, lists.values(), strict=False):
        timed = {n: e for n, e in content["candidates"].items() if "ms" in e and "error" not in e}
        names = list(timed)[::-1]
        shares = [timed[name]["share"] for name in names]
        colour = [colours.get(name.split()[0], "#e08a2c") for name in names]
        bars = panel.barh(names, shares, color=colour, height=0.72)
        base = timed.get(BASE)
        labels = [
            f"{timed[name]['ms']:.3g} ms" + (f", {against:.1f}x" if against else "")
            for name in names
            for against in [speed(timed[name], base)]
        ]
        panel.bar_label(bars, labels, padding=4, fontsize=8)
        panel.axvline(1.0, color="#333333", linewidth=0.8, linestyle=":")
        panel.set_xlim(0, max([1.15, *(1.25 * share for share in shares)]))
        panel.xaxis.set_major_formatter("{x:.0%}")
        panel.set_title(content["title"], loc="left", fontsize=11, fontweight="bold")
        panel.tick_params(axis="y", length=0, labelsize=8)
        panel.spines[["top", "right", "left"]].set_visible(False)
    for panel in panels[1]:
        panel.set_xlabel("share of a device-to-device copy's bandwidth")
    figure.suptitle(
        f"One optimizer step with clipping, {gpu}: time, and speed against torch's pipeline\n"
        "amp_mp blue, torch grey, others orange; dotted: a copy of memory",
        fontsize=12,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
