"""The inspector: pages and JSON that show what happened to responses. It reads state that other packages have written."""
