"""quire chat: talk to a running server in the terminal. Speaks the OpenAI API with the standard library alone."""

import argparse
import http.client
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"


class ServerError(RuntimeError):
    """The server is absent or refused; one line for a person."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="talk to a running server", description=f"Talk to a running server. {HELP}.")
    parser.add_argument("message", nargs="?", help="ask this one question and leave")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument("--model", help="name of the model (default: the first one served)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the server's)")
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens (default: the server's)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="bearer token (default: $OPENAI_API_KEY)")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    server = Server(parsed.base_url, parsed.api_key)
    try:
        body: dict[str, Any] = {"model": parsed.model or server.first_model(), "stream": True}
        for name in ("temperature", "max_tokens"):
            if getattr(parsed, name) is not None:
                body[name] = getattr(parsed, name)
        conversation = Conversation(server, body, parsed.system)
        if parsed.message is not None:
            conversation.ask(parsed.message)
            return 0
        print(f"{body['model']} at {parsed.base_url}. {HELP}.")
        _talk(conversation)
        return 0
    except ServerError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130


def _talk(conversation: "Conversation") -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  input() then edits the line and remembers earlier ones
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        match text:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                conversation.reset()
                print("(forgotten)")
            case _ if text.startswith("/"):
                print(f"(unknown command; {HELP})")
            case _:
                try:
                    conversation.ask(text)
                except ServerError as error:
                    print(f"(error: {error})")


class Conversation:
    """The messages so far. A question that got no whole answer is forgotten, so the next one is not confused by it."""

    def __init__(self, server: "Server", body: dict[str, Any], system: str | None) -> None:
        self._server = server
        self._body = body
        self._system = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._system)

    def ask(self, text: str) -> None:
        """Print the answer as it comes. Ctrl-C closes the connection, which ends the work on the server too."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            for piece in self._server.stream("/v1/chat/completions", self._body | {"messages": asked}):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" (stopped)", end="")
        finally:
            if answer:
                print(flush=True)
        if answer:
            self.messages = [*asked, {"role": "assistant", "content": answer}]


class Server:
    """One OpenAI-compatible server."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise SystemExit(f"quire: error: --base-url {base_url!r} is no http or https address")
        self._base_url = base_url
        self._secure = url.scheme == "https"
        self._host, self._port = url.hostname, url.port
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        connection, response = self._request("GET", "/v1/models", None)
        try:
            models = json.loads(response.read())["data"]
            return str(models[0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self._base_url} does not answer like an OpenAI-compatible server") from None
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """Pieces of the answer's text, as the server sends them."""
        connection, response = self._request("POST", path, body)
        try:
            for raw in response:
                line = raw.decode("utf-8").strip()
                if line == "data: [DONE]":
                    return
                if not line.startswith("data:"):
                    continue  # a comment or a blank line
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise ServerError(_message(chunk))
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""
            raise ServerError("the answer broke off")
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the connection broke: {error}") from None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=600)
        try:
            connection.request(method, self._prefix + path, json.dumps(body) if body else None, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerError(f"no server at {self._base_url} ({error}); start one with: quire serve") from None
        if response.status == 200:
            return connection, response
        with closing(connection):
            text = response.read().decode("utf-8", "replace")
        with suppress(ValueError):
            text = _message(json.loads(text))
        raise ServerError(f"{response.status} {response.reason}: {text[:500]}")


def _message(answer: Any) -> str:
    """The text inside an OpenAI-shaped error."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
