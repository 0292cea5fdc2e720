"""The live page of the admin port: rendered here, works without JavaScript, fetches nothing from elsewhere."""

from router.admin.ui.page import Page

__all__ = ["Page"]
