from tests.gateway.features.conversations.conftest import client, folder, gateway

__all__ = ["client", "folder", "gateway"]
