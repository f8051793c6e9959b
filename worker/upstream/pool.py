"""The upstreams of a worker: which of them answer, and which one takes the next stream.

down      asked for its capabilities until it answers
usable    asked for its models every WATCH_S
doubtful  a stream has just broken: asked at once, and not used until it has answered
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

from tokenizers import Tokenizer

from quire.shared.process.backoff import Backoff
from quire.shared.protocol.messages import SamplingParams
from quire.worker.upstream.capabilities import Capabilities, find_capabilities
from quire.worker.upstream.client import StreamBroken, UpstreamClient, UpstreamDown, UpstreamRefused
from quire.worker.upstream.requests import unknown_parameters

log = logging.getLogger(__name__)

# Interval at which a usable upstream is asked, and the backoff for one that is down.
WATCH_S = 2.0
DOWN_S = (0.5, 5.0)
# Longest time that a usable upstream may take to answer.
HEALTH_S = 10.0


class Upstream:
    """One server. reason: why it is not usable; empty if it is."""

    def __init__(self, client: UpstreamClient) -> None:
        self.client = client
        self.capabilities: Capabilities | None = None
        self.reason = "it has not been asked yet"
        # Its context when it was usable last; None if it did not say.
        self.max_model_len: int | None = None
        self.num_streams = 0
        # Streams that broke, and those that continue an answer.
        self.num_breaks = self.num_continued = self.num_tokens = 0
        self._is_logged = False
        # When the upstream became unusable.
        self.lost_at = time.monotonic()
        self.asked = asyncio.Event()

    @property
    def url(self) -> str:
        return self.client.url

    def found(self, capabilities: Capabilities) -> None:
        """Note that the upstream answers."""
        if self._is_logged or self.capabilities is None:
            log.info("upstream %s answers: %s", self.url, capabilities)
        self.capabilities, self.reason, self._is_logged = capabilities, "", False
        self.max_model_len = capabilities.max_model_len

    def lost(self, reason: str) -> None:
        """Note that the upstream does not answer; the log says so once."""
        if not self._is_logged:
            log.error("upstream %s cannot be used, and is asked again until it can: %s", self.url, reason)
        self._note_lost()
        self.capabilities, self.reason, self._is_logged = None, reason, True

    def doubt(self, reason: str) -> None:
        """Have the upstream asked at once, and do not use it before it has answered."""
        self._note_lost()
        self.reason = self.reason or reason
        self.asked.set()

    def _note_lost(self) -> None:
        if not self.reason:
            self.lost_at = time.monotonic()


class UpstreamPool:
    """All upstreams of a worker. served_name, wanted_model: what the model is called at an upstream."""

    def __init__(
        self, clients: Iterable[UpstreamClient], tokenizer: Tokenizer, served_name: str, wanted_model: str
    ) -> None:
        self.upstreams = [Upstream(client) for client in clients]
        self._tokenizer = tokenizer
        self._served_name = served_name
        self._wanted_model = wanted_model
        self._changed = asyncio.Event()

    @property
    def num_usable(self) -> int:
        return sum(not upstream.reason for upstream in self.upstreams)

    @property
    def unusable_s(self) -> float:
        """Seconds for which no upstream has been usable; 0 if one is."""
        return 0.0 if self.num_usable else time.monotonic() - max(upstream.lost_at for upstream in self.upstreams)

    @property
    def reasons(self) -> dict[str, str]:
        """Why each upstream is not usable, by URL; empty for those that are."""
        return {upstream.url: upstream.reason for upstream in self.upstreams}

    @property
    def max_model_len(self) -> int | None:
        """The shortest context of the upstreams that have given one."""
        return min((one.max_model_len for one in self.upstreams if one.max_model_len), default=None)

    async def ask_all(self) -> None:
        """Ask every upstream once."""
        await asyncio.gather(*map(self._ask, self.upstreams))

    async def watch(self) -> None:
        """Follow the state of every upstream until the task is cancelled."""
        await asyncio.gather(*map(self._watch, self.upstreams))

    async def close(self) -> None:
        for upstream in self.upstreams:
            await upstream.client.close()

    def choose(self, sampling: SamplingParams) -> Upstream | None:
        """Return the usable upstream with the fewest streams; None if none is usable.

        Raises UpstreamRefused if none of the usable ones can honour the parameters.
        """
        usable = [(one, one.capabilities) for one in self.upstreams if not one.reason and one.capabilities is not None]
        if not usable:
            return None
        faults = {upstream: unknown_parameters(sampling, capabilities) for upstream, capabilities in usable}
        able = [upstream for upstream, fault in faults.items() if not fault]
        if not able:
            upstream, fault = next(iter(faults.items()))
            raise UpstreamRefused(f"it is {upstream.capabilities and upstream.capabilities.family}, without {fault}")
        return min(able, key=lambda upstream: upstream.num_streams)

    async def wait(self, timeout_s: float) -> None:
        """Wait until an upstream becomes usable, for this time at most."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def _watch(self, upstream: Upstream) -> None:
        backoff = Backoff(*DOWN_S)
        await self._ask(upstream)
        while True:
            if upstream.capabilities is not None:
                backoff.reset()
            pause_s = WATCH_S if upstream.capabilities is not None else backoff.next()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await upstream.asked.wait()
            upstream.asked.clear()
            await self._ask(upstream)

    async def _ask(self, upstream: Upstream) -> None:
        found = upstream.capabilities
        try:
            async with asyncio.timeout(None if found is None else HEALTH_S):
                if found is None:
                    found = await find_capabilities(
                        upstream.client, self._tokenizer, self._served_name, self._wanted_model
                    )
                else:
                    await upstream.client.get("/v1/models")
        except (UpstreamRefused, UpstreamDown, StreamBroken) as error:
            upstream.lost(str(error))
        except TimeoutError:
            upstream.lost(f"no answer within {HEALTH_S:g} s")
        except Exception as error:  # an answer in a form that nobody has thought of ends no worker
            log.debug("upstream %s answers in an unknown form", upstream.url, exc_info=error)
            upstream.lost(f"its answer cannot be read ({type(error).__name__}); is it a server of completions?")
        else:
            is_new = bool(upstream.reason)
            upstream.found(found)
            if is_new:
                self._changed.set()
