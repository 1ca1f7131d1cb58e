"""Endpoint and credentials of S3 for a tensorstore spec, from the environment and the profiles of AWS's tools.

tensorstore 0.1.86 does not read profiles by itself and ignores `AWS_ENDPOINT_URL`: it would send unsigned requests, and
to Amazon. The spec contains paths of credential files, never their content, since a spec may be printed.
"""

import configparser
import os
from collections.abc import Mapping
from typing import Any

_CREDENTIALS = {"aws_access_key_id", "role_arn", "credential_process"}
"""The settings of a profile from which tensorstore obtains credentials."""


def s3_fields(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the fields of an `s3` spec that give endpoint, region and credentials.

    Keys in the environment come first, then the profile (`AWS_PROFILE`, `AWS_DEFAULT_PROFILE` or "default"), then
    the role of the container or instance. The endpoint is `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` or the profile's
    `endpoint_url`; Amazon's if `AWS_IGNORE_CONFIGURED_ENDPOINT_URLS`, or else the profile's
    `ignore_configured_endpoint_urls`, is true. The region is `AWS_REGION`, `AWS_DEFAULT_REGION` or the profile's.

    Raises:
        PermissionError: AWS_PROFILE names a profile that neither file has.
    """
    env = os.environ if environ is None else environ
    files = _file(env, "AWS_SHARED_CREDENTIALS_FILE", "credentials"), _file(env, "AWS_CONFIG_FILE", "config")
    name = env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE") or "default"
    settings = _profile(files, name)
    fields: dict[str, Any] = {}
    if env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
        fields["aws_credentials"] = {"type": "environment"}
    elif settings.keys() & _CREDENTIALS:
        there = [path if os.path.isfile(path) else os.devnull for path in files]
        paths = {"credentials_file": there[0], "config_file": there[1]}
        fields["aws_credentials"] = {"type": "profile", "profile": name, **paths}
    elif env.get("AWS_PROFILE") and not settings:
        raise PermissionError(
            f"AWS_PROFILE={name!r}: must be a profile in {files[0]} or {files[1]}, but neither has it; "
            "set AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE to use other files"
        )
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or settings.get("region")
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or settings.get("endpoint_url")
    # As in botocore: the variable decides if it is set, even to an empty string, and then the profile.
    ignored = env.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", settings.get("ignore_configured_endpoint_urls", ""))
    if ignored.lower() == "true":
        endpoint = None
    if endpoint:
        fields["endpoint"] = endpoint.rstrip("/")
    if region or endpoint:  # tensorstore requires a region with an endpoint, but uses only its name
        fields["aws_region"] = region or "us-east-1"
    return fields


def _file(env: Mapping[str, str], variable: str, name: str) -> str:
    return os.path.expanduser(env.get(variable) or os.path.join("~", ".aws", name))


def _profile(files: tuple[str, str], name: str) -> dict[str, str]:
    """Return the settings of a profile; those of the credentials file take precedence."""
    settings: dict[str, str] = {}
    for path, sections in ((files[0], (name,)), (files[1], (f"profile {name}", name))):
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in filter(parser.has_section, sections):
            settings = {key: (value or "").strip() for key, value in parser.items(section)} | settings
    return settings
