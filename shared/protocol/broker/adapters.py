"""The verbs about LoRA adapters that were announced at run time: a hash of the lane, with an entry per adapter."""

from __future__ import annotations

from quire.shared.model.adapter_names import Announcement, InvalidAdapter
from quire.shared.protocol.broker.lane import Lane, text

__all__ = ["AdapterVerbs", "Announcement"]

# Announcements of a lane at most; a hostile hash must not fill the memory of workers and gateways.
MAX_ANNOUNCEMENTS = 1024


class AdapterVerbs(Lane):
    """Announces adapters to all workers of a model."""

    async def announce_adapter(self, announcement: Announcement) -> bool:
        """Announce an adapter. Return False if an adapter of this name is announced."""
        return bool(await self.client.hsetnx(self.keys.adapters, announcement.name, announcement.encode()))

    async def withdraw_adapter(self, name: str) -> bool:
        """Withdraw an announcement. Return False if no announcement has this name."""
        return bool(await self.client.hdel(self.keys.adapters, name))

    async def announced_adapters(self) -> dict[str, Announcement]:
        """Return all announcements by name. Those that cannot be read are counted and left out."""
        if await self.client.hlen(self.keys.adapters) > MAX_ANNOUNCEMENTS:
            self.note_corrupt("adapters", self.keys.adapters, f"more than {MAX_ANNOUNCEMENTS} entries")
            return {}
        announcements = {}
        for name, data in (await self.client.hgetall(self.keys.adapters)).items():
            try:
                announcements[text(name)] = Announcement.decode(text(name), text(data))
            except InvalidAdapter as error:
                self.note_corrupt("adapter", text(name), error)
        return announcements
