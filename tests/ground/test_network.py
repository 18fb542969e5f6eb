"""Which hosts a list names, and which addresses an allowed name may be at."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest

from hermes_rl.config import parse_assignment, parse_config, to_yaml
from hermes_rl.definitions import identity_of
from hermes_rl.errors import UserError
from hermes_rl.identity import digest
from hermes_rl.network import AllowedHosts, open_listener, parse_host, parse_network

BASE = {"dataset": {"path": "x"}, "model": {"name": "noop"}}


def network_of(value: object) -> object:
    return parse_config({**BASE, "sandbox": {"network": value}}).sandbox.network


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (True, True),
        (False, False),
        ("on", True),
        ("Off", False),
        ([], False),
        ("b.example, A.example.", ("a.example", "b.example")),
        (["*.Example.org:443", "*.example.org:443"], ("*.example.org:443",)),
        (["[::FFFF:10.0.0.1]:80", "10.0.0.1:80"], ("10.0.0.1:80",)),
        ("[0::1]:8080", ("[::1]:8080",)),
        (parse_assignment("sandbox.network=[a.example, b.example]")[1], ("a.example", "b.example")),
    ],
)
def test_network_setting_accepts_off_on_and_hosts(value: object, wanted: object) -> None:
    assert network_of(value) == wanted


@pytest.mark.parametrize(
    "value",
    [
        *("", 5, None, "*", "*.", "a b", "http://a.example", "a.example/x", "user@a.example"),
        *("a..b", "a.example:0", "a.example:65536", "127.1", "0177.0.0.1", "2130706433", "0x7f.1"),
        *("-a.example", "*.10.0.0.1", "*.[::1]", "fe80::1", "[fe80::1%lo]", "ä.example", "a%2e.b"),
        ["a.example", 1],
    ],
)
def test_invalid_hosts_are_refused_in_one_line(value: object) -> None:
    with pytest.raises(UserError) as refused:
        network_of(value)
    assert "'sandbox.network' " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_network_off_and_on_keep_the_identity_of_older_runs() -> None:
    """The definition, and so the hash, of a run with a list is that of the set of its hosts."""
    identities = {
        name: identity_of(parse_config({**BASE, "sandbox": {"network": value}}))
        for name, value in (
            *(("off", False), ("on", True), ("none", [])),
            *(("list", ["b.example", "a.example"]), ("same", "a.example,b.example,A.example")),
        )
    }
    assert identities["off"]["sandbox"]["network"] is False
    assert identities["on"]["sandbox"]["network"] is True
    assert identities["none"] == identities["off"]
    assert identities["list"]["sandbox"]["network"] == ["a.example", "b.example"]
    assert digest(identities["list"]) == digest(identities["same"])
    assert "network: false" in to_yaml(parse_config({**BASE, "sandbox": {"network": "off"}}))


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("a.example", "a.example", 443, True),
        ("a.example", "A.EXAMPLE.", 80, True),
        ("a.example", "a.example", 8080, False),
        ("a.example:8080", "a.example", 8080, True),
        ("a.example:8080", "a.example", 443, False),
        ("a.example", "b.a.example", 443, False),
        ("a.example", "a.example.evil.example", 443, False),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "evilexample.org", 443, False),
        ("*.org", "10.0.0.1", 80, False),
        ("10.0.0.1", "10.0.0.1", 80, True),
        ("10.0.0.1", "[::ffff:10.0.0.1]", 80, True),
        ("[::1]:80", "[0:0::1]", 80, True),
        ("[::1]:80", "[::2]", 80, False),
    ],
)
def test_entries_match_hosts_and_ports(entry: str, host: str, port: int, allowed: bool) -> None:
    assert AllowedHosts((entry,)).allow(parse_host(host), port) == allowed


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((one, True) for one in ("93.184.215.14", "2606:2800:21f:cb07::1", "64:ff9b::5db8:d70e")),
        *((one, False) for one in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1")),
        *((one, False) for one in ("169.254.169.254", "100.100.100.200", "168.63.129.16")),
        ("192.0.0.192", False),
        *((one, False) for one in ("0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255")),
        *((one, False) for one in ("240.0.0.1", "198.18.0.1", "192.0.2.1", "192.88.99.1")),
        *((one, False) for one in ("::", "::1", "fe80::1", "fd00:ec2::254", "fec0::1", "ff02::1")),
        *((one, False) for one in ("::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::a00:1")),
        *((one, False) for one in ("2002:a00:1::", "2001:0:a00:1::", "64:ff9b:1::1")),
    ],
)
def test_names_may_resolve_to_public_addresses_only(address: str, public: bool) -> None:
    hosts = AllowedHosts(("a.example",))
    assert hosts.allow_address(ip_address(address), 443) == public


def test_an_address_entry_also_permits_names_at_it() -> None:
    hosts = AllowedHosts(("mirror.example", "10.0.0.5:443"))
    assert hosts.allow_address(ip_address("10.0.0.5"), 443)
    assert hosts.allow_address(ip_address("::ffff:10.0.0.5"), 443)
    assert not hosts.allow_address(ip_address("10.0.0.5"), 80)
    assert not hosts.allow_address(ip_address("10.0.0.6"), 443)


def test_canonical_hosts_parse_to_themselves() -> None:
    found = parse_network("*.A.example:99,[::1],1.2.3.4,b")
    assert isinstance(found, tuple)
    assert parse_network(found) == found


def test_a_listener_takes_a_name_of_either_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv4 where a name has both, IPv6 where it has no other address."""
    resolve, known = socket.getaddrinfo, {"six.lan": ["::1"], "both.lan": ["::1", "127.0.0.1"]}

    def resolver(host: str, *args: int, **more: int) -> list[object]:
        return [one for name in known.get(host, [host]) for one in resolve(name, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    wanted = {"six.lan": "::1", "both.lan": "127.0.0.1", "::1": "::1", "": "0.0.0.0"}
    for host, address in wanted.items():
        with open_listener(host, 0) as listener:
            assert listener.getsockname()[0] == address
            with pytest.raises(UserError, match="Choose another --host or --port"):
                open_listener(host, listener.getsockname()[1])
    for host, port in [("127.0.0.1", 70_000), ("a" * 64, 0)]:
        with pytest.raises(UserError, match=f"{host}:{port} cannot be used"):
            open_listener(host, port)
