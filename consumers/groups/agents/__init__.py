"""Agent tasks: model calls, retrievals and tool calls against outside providers."""
