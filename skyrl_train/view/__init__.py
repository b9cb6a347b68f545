"""The viewer: reads run folders and serves them to a browser."""

__all__: list[str] = []
