from tests.support.gateway.response_fixtures import client, folder, gateway

__all__ = ["client", "folder", "gateway"]
