"""A name server that says 127.0.0.2 at the first look and 127.0.0.3 at the second, and a proxy
whose list names 127.0.0.2. Run by test_egress with a network and mounts of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import tempfile

from hermes_rl.network import AllowedHosts
from hermes_rl.sandboxes import EgressProxy

PORT = 8080
ADDRESSES = ("127.0.0.2", "127.0.0.3")
TYPE_A = 1
looks = 0


class NameServer(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        global looks
        end = data.index(b"\0", 12) + 5
        question = data[12:end]
        (kind,) = struct.unpack("!H", question[-4:-2])
        answer = b""
        if kind == TYPE_A:
            address = socket.inet_aton(ADDRESSES[min(looks, 1)])
            answer = b"\xc0\x0c" + struct.pack("!HHIH", TYPE_A, 1, 0, 4) + address
            looks += 1
        head = data[:2] + struct.pack("!HHHHH", 0x8180, 1, int(bool(answer)), 0, 0)
        self.transport.sendto(head + question + answer, addr)  # type: ignore[attr-defined]


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.NamedTemporaryFile("w") as conf:
        conf.write("nameserver 127.0.0.1\noptions timeout:30\n")
        conf.flush()
        subprocess.run(["mount", "--bind", conf.name, "/etc/resolv.conf"], check=True)
        asyncio.run(ask())


async def ask() -> None:
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 53))
    reached = dict.fromkeys(ADDRESSES, 0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached[writer.get_extra_info("sockname")[0]] += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        for address in ADDRESSES:
            await stack.enter_async_context(await asyncio.start_server(serve, address, PORT))
        listener = socket.create_server(("127.0.0.1", 0))
        hosts = AllowedHosts((f"rebinding.test:{PORT}", f"127.0.0.2:{PORT}"))
        proxy = EgressProxy(listener, hosts, lambda connection: None)
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(f"GET http://rebinding.test:{PORT}/ HTTP/1.1\r\n\r\n".encode())
            print((await reader.readline()).split()[1].decode())
            writer.close()
        await proxy.aclose()
    print("good", reached["127.0.0.2"], "trap", reached["127.0.0.3"], "looks", looks)


if __name__ == "__main__":
    main()
