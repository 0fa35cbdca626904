"""TLS of the gateway's port: the OpenAI SDK through it, plain HTTP refused, a renewed certificate served, clear refusals."""

import asyncio
import datetime
import ssl
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gateway import tls
from gateway.api_keys import hashed
from shared.config import FATAL_EXIT, BadConfig, from_sources
from tests.integration.test_gateway_process import ANSWER, free_port, gateway, stub, until_ready


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed one for localhost; its files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    key_bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    cert_file, key_file = folder / "tls.crt", folder / "tls.key"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(key_bytes)
    return cert_file, key_file


async def served_name(port: int) -> str:
    """Common name of the certificate that a new connection gets."""
    blind = ssl._create_unverified_context()
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=blind)
    raw = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return str(x509.load_der_x509_certificate(raw).subject.rfc4514_string())


@pytest.mark.model
async def test_the_openai_sdk_over_tls(smollm2_folder: Path, tmp_path: Path) -> None:
    """With keys besides; probes and Prometheus need neither on a port of their own."""
    cert, key = certificate(tmp_path, "one")
    (tmp_path / "tenants.toml").write_text(f'[tenants.acme]\nkeys = ["{hashed("secret")}"]\n')
    port, watched = free_port(), free_port()
    flags = (
        f"--model={smollm2_folder}",
        f"--port={port}",
        "--served-model-name=smol",
        f"--tls-cert={cert}",
        f"--tls-key={key}",
        f"--api-key-file={tmp_path / 'tenants.toml'}",
        f"--metrics-port={watched}",
    )
    async with stub(smollm2_folder) as (_, address), gateway(*flags, f"--gateway-link={address}"):
        trusting = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(verify=trusting) as http:
            await until_ready(f"http://127.0.0.1:{watched}")
            client = openai.AsyncOpenAI(
                base_url=f"https://localhost:{port}/v1", api_key="secret", http_client=http, max_retries=0
            )
            stream = await client.chat.completions.create(
                model="smol", messages=[{"role": "user", "content": "?"}], stream=True, max_tokens=20
            )
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == ANSWER
            assert (await http.get(f"https://localhost:{port}/metrics")).status_code == 401
        async with httpx.AsyncClient() as plain:
            counted = await plain.get(f"http://127.0.0.1:{watched}/metrics")
            assert 'quire_gateway_tenant_tokens_total{kind="prompt",tenant="acme"}' in counted.text
            assert (await plain.get(f"http://127.0.0.1:{watched}/v1/models")).status_code == 404
            assert (await plain.post(f"http://127.0.0.1:{watched}/drain/w")).status_code == 404
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://localhost:{port}/ready")
        async with httpx.AsyncClient() as stranger:  # does not know our issuer
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"https://localhost:{port}/ready")


async def test_a_renewed_certificate_is_served(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "old")
    config = from_sources({"tls_cert": str(cert), "tls_key": str(key)}, {})
    made = tls.context(config)
    assert made
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=made)
    port = server.sockets[0].getsockname()[1]
    keeper = asyncio.create_task(tls.keep_fresh(made, config, look_s=0.05))
    assert await served_name(port) == "CN=old"
    (tmp_path / "new").mkdir()
    new_cert, new_key = certificate(tmp_path / "new", "new")
    cert.write_bytes(new_cert.read_bytes())  # for a moment the two do not fit
    await asyncio.sleep(0.2)
    assert await served_name(port) == "CN=old"
    key.write_bytes(new_key.read_bytes())
    for _ in range(600):
        if await served_name(port) == "CN=new":
            break
        await asyncio.sleep(0.05)
    assert await served_name(port) == "CN=new"
    keeper.cancel()
    server.close()
    await server.wait_closed()


async def test_bad_files_are_refused(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    with pytest.raises(BadConfig, match="belong together"):
        tls.context(from_sources({"tls_cert": str(cert)}, {}))
    with pytest.raises(BadConfig, match="No such file"):
        tls.context(from_sources({"tls_cert": str(tmp_path / "no"), "tls_key": str(key)}, {}))
    key.write_text("no key")
    with pytest.raises(BadConfig, match=r"tls\.key"):
        tls.context(from_sources({"tls_cert": str(cert), "tls_key": str(key)}, {}))


@pytest.mark.model
async def test_the_process_says_what_is_wrong(smollm2_folder: Path, tmp_path: Path) -> None:
    flags = (f"--model={smollm2_folder}", "--port=0", f"--tls-cert={tmp_path}/no", f"--tls-key={tmp_path}/no")
    async with gateway(*flags) as process:
        assert process.stderr
        assert b"tls_cert" in (await process.stderr.read()).splitlines()[-1]
        assert await process.wait() == FATAL_EXIT
