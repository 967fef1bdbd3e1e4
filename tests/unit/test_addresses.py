import pytest

from muster.addresses import Address, is_loopback, key, odd_name, parse_address
from muster.errors import Refused


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.11:2222", "10.0.0.11", 2222),
        ("gpu-a.example.com:1", "gpu-a.example.com", 1),
        ("localhost:65535", "localhost", 65535),
        ("[fd00::5]:2222", "fd00::5", 2222),
        ("[fe80::1%eth0]:2222", "fe80::1%eth0", 2222),
        ("工作站:2222", "工作站", 2222),
    ],
)
def test_an_address_is_read_and_written_back_alike(text, host, port):
    """CD-14: IPv6 in brackets."""
    address = parse_address(text, "here")
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "because", "hint"),
    [
        ("", "empty", "host:port"),
        ("  ", "empty", ""),
        ("h1:2222 ", "blank", "'h1:2222'"),
        ("h1:2222\n", "blank", "'h1:2222'"),
        ("h1", "port is missing", "h1:2222"),
        ("grpc://h1:2222", "scheme", "'h1:2222'"),
        ("h1:70000", "1 to 65535; TensorFlow would silently use 4464", "1024"),
        ("h1:0", "1 to 65535", ""),
        ("h1:-1", "'-1' is no port", ""),
        ("h1:22a", "'22a' is no port", ""),
        ("h1:", "'' is no port", ""),
        ("h1:²²", "is no port", ""),
        ("h1:2222,", "comma", ""),
        ("h1:2222 , h2:2222", "blank", "one address a string"),
        ("h1:2222/path", "slash", ""),
        (":2222", "host is missing", ""),
        ("fd00::5:2222", "without brackets", "[fd00::5]:2222"),
        ("[fd00::5]", "brackets with the port", "[fd00::5]:2222"),
        ("[fd00::zz]:2222", "zz", ""),
        ("-oProxyCommand=touch:22", "dash", ""),
        ("a;touch:22", "';'", ""),
        ("$(touch):22", "'$'", ""),
        ("a\x00b:22", "'\\x00'", ""),
        ("h" * 300 + ":22", "253 characters", ""),
        ("10.0.0.256:22", "256", ""),
        ("1.2.3:22", "4 octets", ""),
    ],
)
def test_a_slip_in_an_address_is_named(text, because, hint):
    """CD-13, CD-14, B2."""
    with pytest.raises(Refused) as refused:
        parse_address(text, "cluster.toml, line 7: run.ps[0]")
    assert because in refused.value.because
    assert hint in refused.value.try_
    assert refused.value.at == "cluster.toml, line 7: run.ps[0]"
    assert len(refused.value.what) < 120


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("hostA:2222", "HOSTA:2222", True),
        ("localhost:1", "127.0.0.1:1", True),
        ("a.b.:1", "a.b:1", True),
        ("[FD00::0005]:1", "[fd00::5]:1", True),
        ("a:1", "a:2", False),
        ("a:1", "b:1", False),
    ],
)
def test_two_spellings_of_one_place_have_one_key(one, other, same):
    """CD-04."""
    assert (parse_address(one, "").key == parse_address(other, "").key) is same


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("dns", "URI of scheme"),
        ("unix", "URI of scheme"),
        ("IPv4", "URI of scheme"),
        ("ipv6", "URI of scheme"),
        ("xds", "URI of scheme"),
        ("gpu_box", "underscore"),
        ("训练机", "xn--"),
        ("gpu-box", ""),
    ],
)
def test_a_name_that_grpc_misreads_is_warned_of(host, said):
    """CD-16."""
    found = odd_name(host)
    assert said in found if said else found == ""


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("localhost", True), ("::1", True), ("10.0.0.1", False), ("gpu", False)],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback
    assert key(host) == key(host.upper())


def test_an_address_of_ipv6_is_shown_in_brackets():
    assert str(Address("fd00::5", 22)) == "[fd00::5]:22"
