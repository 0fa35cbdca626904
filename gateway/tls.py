"""TLS of the HTTP port: a context from the certificate files, read again when they change (certificates are short-lived)."""

import asyncio
import logging
import ssl
from pathlib import Path

from shared.config import BadConfig, Config

log = logging.getLogger("quire.gateway")

LOOK_S = 60.0


def context(config: Config) -> ssl.SSLContext | None:
    """None without a certificate. BadConfig names the file that cannot be used."""
    if not config.tls_cert and not config.tls_key:
        return None
    if not config.tls_cert or not config.tls_key:
        raise BadConfig(f"tls_cert = {config.tls_cert!r}, tls_key = {config.tls_key!r}: they belong together")
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        made.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise BadConfig(f"tls_cert = {config.tls_cert!r}, tls_key = {config.tls_key!r}: {error}") from None
    return made


def _changed(config: Config) -> tuple[int, int]:
    return Path(config.tls_cert).stat().st_mtime_ns, Path(config.tls_key).stat().st_mtime_ns


async def keep_fresh(made: ssl.SSLContext, config: Config, look_s: float = LOOK_S) -> None:
    """New connections get the newest certificate. A pair that does not fit (one file is written already) waits."""
    seen = _changed(config)
    while True:
        await asyncio.sleep(look_s)
        try:
            now = _changed(config)
            if now == seen:
                continue
            # A pair that does not fit would leave the context with half of it: it is tried elsewhere first.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key)
            made.load_cert_chain(config.tls_cert, config.tls_key)
        except (OSError, ssl.SSLError) as error:
            log.warning("the new certificate cannot be used", extra={"cert": config.tls_cert, "reason": str(error)})
            continue
        seen = now
        log.info("certificate renewed", extra={"cert": config.tls_cert})
