"""The values of the chart and their types. `config` is the router's own schema, so that it cannot say anything else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.settings import KubernetesSettings, Settings

Object = dict[str, Any]
"""A part of Kubernetes' own API, which its server checks."""
Labels = dict[str, str]
Count = Annotated[int, Field(ge=1, le=10_000)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Percent = Annotated[int, Field(ge=0, le=1000)]
Interval = Annotated[str, Field(pattern=r"^([0-9]+(ms|s|m|h))+$")]
IntOrPercent = Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^[0-9]+%$")]
Folder = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]
"""A part of a volume's name as well."""
Fullname = Annotated[str, Field(pattern=r"^([a-z]([a-z0-9-]{0,51}[a-z0-9])?)?$")]
"""Of a Service, with room for what the chart puts after it; empty when it is not given."""


class Part(BaseModel):
    """Of the values that are the chart's own."""

    model_config = ConfigDict(extra="forbid")


class SecretKey(Part):
    name: str = ""
    key: Annotated[str, Field(min_length=1)]


class AdminSecrets(Part):
    token: SecretKey


class IdentitySecrets(Part):
    secret: SecretKey


class StoreSecrets(Part):
    password: SecretKey
    sentinel_password: SecretKey


class KeysSecrets(Part):
    file: SecretKey
    replica_key: SecretKey


class Secrets(Part):
    admin: AdminSecrets
    identity: IdentitySecrets
    store: StoreSecrets
    keys: KeysSecrets


class Image(Part):
    repository: Annotated[str, Field(min_length=1)]
    tag: str = ""
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"]


class Probe(Part):
    initialDelaySeconds: Annotated[int, Field(ge=0)] = 0
    periodSeconds: Annotated[int, Field(ge=1)]
    failureThreshold: Annotated[int, Field(ge=1)]
    timeoutSeconds: Annotated[int, Field(ge=1)]


class Probes(Part):
    startup: Probe
    liveness: Probe
    readiness: Probe


class Disruption(Part):
    enabled: bool
    maxUnavailable: IntOrPercent


class ServiceAccount(Part):
    create: bool
    name: str
    annotations: Labels


class Rbac(Part):
    create: bool


class Service(Part):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    port: Port | None = None
    sessionAffinity: Literal["None", "ClientIP"]
    annotations: Labels
    extraSpec: Object


class Autoscaling(Part):
    enabled: bool
    minReplicas: Count
    maxReplicas: Count
    cpu: Percent
    inFlight: Annotated[int, Field(ge=0)]
    behavior: Object


class ScaleTarget(Part):
    apiVersion: str
    kind: str
    name: str


class EngineScaling(Part):
    enabled: bool
    target: ScaleTarget
    minReplicas: Annotated[int, Field(ge=0)]
    maxReplicas: Count
    prometheus: str
    liveTokens: Annotated[float, Field(ge=0, le=2)]
    requests: Annotated[float, Field(ge=0)]
    matchers: str
    behavior: Object


class NetworkPolicy(Part):
    enabled: bool
    data: list[Object]
    admin: list[Object]
    egress: list[Object]


class ServiceMonitor(Part):
    enabled: bool
    interval: Interval
    tlsConfig: Object


class EngineMonitor(Part):
    enabled: bool
    selector: Labels
    namespaces: list[str]
    port: str
    interval: Interval


class Rules(Part):
    enabled: bool
    runbooks: str


class Dashboards(Part):
    enabled: bool
    labels: Labels
    annotations: Labels


class Metrics(Part):
    labels: Labels
    serviceMonitor: ServiceMonitor
    engines: EngineMonitor
    rules: Rules
    dashboards: Dashboards


class BundledStore(Part):
    enabled: bool
    image: Annotated[str, Field(min_length=1)]
    maxmemory: Annotated[str, Field(pattern=r"^[0-9]+(kb|mb|gb)$")]
    resources: Object


class Ingress(Part):
    enabled: bool
    className: str
    annotations: Labels
    hosts: list[str]
    tls: list[Object]


class HttpRoute(Part):
    enabled: bool
    parentRefs: list[Object]
    hostnames: list[str]
    annotations: Labels
    validation: Object


class Values(Part):
    """All of values.yaml."""

    engines: list[KubernetesSettings]
    config: Settings
    configChange: Literal["reload", "roll"]
    secrets: Secrets
    certificates: dict[Folder, str]
    replicaCount: Annotated[int, Field(ge=0, le=10_000)]
    image: Image
    imagePullSecrets: list[Object]
    fullnameOverride: Fullname
    resources: Object
    terminationGracePeriodSeconds: Annotated[int, Field(ge=1)] | None = None
    lifecycle: Object
    probes: Probes
    strategy: Object
    podDisruptionBudget: Disruption
    antiAffinity: Literal["soft", "hard", "none"]
    topologySpreadConstraints: list[Object]
    affinity: Object
    nodeSelector: Labels
    tolerations: list[Object]
    priorityClassName: str
    runtimeClassName: str
    podAnnotations: Labels
    podLabels: Labels
    commonLabels: Labels
    podSecurityContext: Object
    securityContext: Object
    serviceAccount: ServiceAccount
    rbac: Rbac
    service: Service
    extraArgs: list[str]
    extraEnv: list[Object]
    extraEnvFrom: list[Object]
    extraVolumes: list[Object]
    extraVolumeMounts: list[Object]
    autoscaling: Autoscaling
    engineScaling: EngineScaling
    networkPolicy: NetworkPolicy
    metrics: Metrics
    bundledStore: BundledStore
    ingress: Ingress
    httpRoute: HttpRoute
    global_: Annotated[Object, Field(alias="global")] = {}
    """What Helm hands to every chart that is part of another."""
