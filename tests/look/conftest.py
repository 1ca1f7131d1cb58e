"""The browser, as tests of pages use it."""

from chromium import browser as browser
