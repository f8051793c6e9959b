"""Measures the smoothness of a busy page: the gaps between its frames, and the tasks that delay frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from playwright.async_api import Page

_WATCH = """() => {
  window.watched = { gaps: [], frames: [] };
  let last = performance.now();
  const watch = (now) => { window.watched.gaps.push(now - last); last = now; requestAnimationFrame(watch); };
  requestAnimationFrame(watch);
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
      window.watched.frames.push({
        duration: entry.duration,
        blocking: entry.blockingDuration,
        layout: entry.styleAndLayoutStart ? entry.startTime + entry.duration - entry.styleAndLayoutStart : 0,
        scripts: entry.scripts.map((script) => [script.invoker, Math.round(script.duration)]),
      });
    }
  }).observe({ type: "long-animation-frame" });
}"""


@dataclass(frozen=True)
class Frames:
    """Times in milliseconds. gaps: the gaps between frames, sorted. long: Chromium's entries of frames over 50 ms."""

    gaps: list[float]
    long: list[dict[str, Any]]

    @property
    def p99(self) -> float:
        return self.gaps[int(0.99 * len(self.gaps))]

    def __str__(self) -> str:
        worst = max(self.long, key=lambda frame: float(frame["duration"]), default=None)
        return (
            f"{len(self.gaps)} frames, median {self.gaps[len(self.gaps) // 2]:.0f} ms, p99 {self.p99:.0f} ms, longest "
            f"{self.gaps[-1]:.0f} ms; {len(self.long)} over 50 ms, the worst {worst}"
        )


async def watch_frames(page: Page) -> None:
    await page.evaluate(_WATCH)


async def watched_frames(page: Page) -> Frames:
    seen = await page.evaluate("window.watched")
    return Frames(sorted(seen["gaps"]), seen["frames"])
