"""The authority of one run: a certificate for each task, naming it. Keys exist in memory and in the agents' pipes only.

Elliptic curve P-256, TLS 1.3. Certificates are valid from a day before (clocks of hosts differ) for a year; an
authority lives as long as its launcher, and signs for nobody else.
"""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from muster.ps.tls import server_name

DAY = datetime.timedelta(days=1)


class Authority:
    def __init__(self, run: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"muster run {run}"[:64])])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = self._builder(self._name, self._key.public_key()).add_extension(constraints, critical=True)
        self._certificate = (
            builder.add_extension(usage, critical=True)
            .add_extension(own, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def papers(self, task: str) -> dict[str, str]:
        """What ``muster.ps.tls.context`` takes, for ``task`` alone."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, task)])
        names = x509.SubjectAlternativeName([x509.DNSName(server_name(task))])
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = self._builder(subject, key.public_key()).add_extension(names, critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        signed = builder.add_extension(both, critical=False).add_extension(issuer, critical=False)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return {
            "authority": _pem(self._certificate),
            "certificate": _pem(signed.sign(self._key, hashes.SHA256())),
            "key": private.decode(),
        }

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + 365 * DAY)
        )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
