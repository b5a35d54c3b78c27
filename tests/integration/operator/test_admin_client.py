"""The admin client over real sockets."""

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from guidevane_api.admin import LimitsPatch
from guidevane_api.limits import PartialLimits
from guidevane_operator.admin_client import AdminClient, Refused, Unreachable
from guidevane_operator.app import open_session

PATCH = LimitsPatch(epoch=1, limits=PartialLimits(max_num_seqs=2))


async def test_pods_that_hang_do_not_take_the_connections_of_the_others() -> None:
    release = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response(status=500)

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=400)

    servers = []
    for handle in (hang, refuse):
        application = web.Application()
        application.router.add_patch("/admin/limits", handle)
        servers.append(TestServer(application))
        await servers[-1].start_server()
    hanging, quick = (server.port or 0 for server in servers)
    async with open_session() as session:
        client = AdminClient(session, timeout_s=20)
        waiting = [asyncio.create_task(client.patch("127.0.0.1", hanging, "t", PATCH)) for _ in range(150)]
        await asyncio.sleep(0)

        async with asyncio.timeout(5):
            answer = await client.patch("127.0.0.1", quick, "t", PATCH)

        assert answer == Refused(400, "no")
        release.set()
        assert {type(result) for result in await asyncio.gather(*waiting)} == {Unreachable}
    for server in servers:
        await server.close()
