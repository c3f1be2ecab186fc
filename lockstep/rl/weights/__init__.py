"""How weights reach generators: shards and checksums, sent part by part or served to readers."""
