"""The error of files without a picture. Gateways know it without Pillow, which takes memory."""


class PictureError(Exception):
    """An image file without a picture. The text is the reason, in one line: "it has ..."."""
