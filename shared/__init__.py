"""What every role shares: messages and their codec, sockets, configuration, page hashes, logs and metrics."""
