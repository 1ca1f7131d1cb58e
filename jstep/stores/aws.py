"""Where S3 is and who asks: the environment and the profiles that AWS's own tools read, put into a tensorstore spec.

tensorstore 0.1.86 reads no profile by itself and does not heed `AWS_ENDPOINT_URL`: it would send unsigned requests,
and to Amazon. Files are named to tensorstore, never read into a spec: a spec may be printed.
"""

import configparser
import os
from collections.abc import Mapping
from typing import Any

_CREDENTIALS = {"aws_access_key_id", "role_arn", "credential_process"}
"""The settings of a profile that tensorstore makes credentials of."""


def s3_fields(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields of an `s3` spec that say where the store is and where the credentials are.

    Keys in the environment come first, then the profile (`AWS_PROFILE`, `AWS_DEFAULT_PROFILE` or "default"), then
    what the machine has: a container's or an instance's role. An endpoint is `AWS_ENDPOINT_URL_S3`,
    `AWS_ENDPOINT_URL` or the profile's `endpoint_url`; a region `AWS_REGION`, `AWS_DEFAULT_REGION` or the profile's.

    Raises:
        PermissionError: AWS_PROFILE names a profile that neither file has.
    """
    env = os.environ if environ is None else environ
    files = _file(env, "AWS_SHARED_CREDENTIALS_FILE", "credentials"), _file(env, "AWS_CONFIG_FILE", "config")
    name = env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE") or "default"
    has_keys = bool(env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"))
    settings = _profile(files, name)
    fields: dict[str, Any] = {}
    if has_keys:
        fields["aws_credentials"] = {"type": "environment"}
    elif settings.keys() & _CREDENTIALS:
        there = [path if os.path.isfile(path) else os.devnull for path in files]
        paths = {"credentials_file": there[0], "config_file": there[1]}
        fields["aws_credentials"] = {"type": "profile", "profile": name, **paths}
    elif env.get("AWS_PROFILE") and not settings:
        raise PermissionError(
            f"AWS_PROFILE={name!r}: must be a profile in {files[0]} or {files[1]}, and neither has it; "
            "AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE name other files"
        )
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or settings.get("region")
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    if not endpoint and env.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
        endpoint = settings.get("endpoint_url")
    if endpoint:
        fields["endpoint"] = endpoint.rstrip("/")
    if region or endpoint:  # with an endpoint tensorstore asks for a region, and only there for its name
        fields["aws_region"] = region or "us-east-1"
    return fields


def _file(env: Mapping[str, str], variable: str, name: str) -> str:
    return os.path.expanduser(env.get(variable) or os.path.join("~", ".aws", name))


def _profile(files: tuple[str, str], name: str) -> dict[str, str]:
    """The settings of a profile, those of the credentials file first."""
    settings: dict[str, str] = {}
    for path, sections in ((files[0], (name,)), (files[1], (f"profile {name}", name))):
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in sections:
            if parser.has_section(section):
                settings = {key: (value or "").strip() for key, value in parser.items(section)} | settings
    return settings


def secrets(environ: Mapping[str, str] | None = None) -> list[str]:
    """What must never be in a message: the values of the variables that hold credentials."""
    env = os.environ if environ is None else environ
    words = ("SECRET", "TOKEN", "PASSWORD", "ACCESS_KEY", "CREDENTIAL")
    return [value for key, value in env.items() if len(value) >= 4 and any(word in key.upper() for word in words)]
