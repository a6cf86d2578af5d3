"""What processes say to each other: ids, messages, errors, sampling parameters, codec, sockets. Imports nothing of ours and no torch."""
