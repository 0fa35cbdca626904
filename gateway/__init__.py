"""The HTTP face: OpenAI's API in, sequences to the scheduler, text out. Owns text and live streams; no pages, no torch.

Without HTTP: `gateway.session` is the seam. It takes a ValidRequest (from `gateway.openai` or built by hand) and gives token
ids and text back; the Python API stands on it.
"""
