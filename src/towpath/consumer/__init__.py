"""The consumer engine: receive, lane by key, claim, handle, settle, acknowledge."""
